// What a warp pays for leaving a poll loop thread by thread: cycles a turn of one block on one GPU.
//
// nvcc -O3 -gencode=arch=compute_90a,code=sm_90a benchmarks/poll_loops.cu -o /tmp/poll_loops && /tmp/poll_loops
#include <cstdint>
#include <cstdio>

constexpr int kTurns = 200, kThreads = 224;

enum class Poll { kNone, kOneThread, kAllThreads, kVote };

__device__ inline float over_warp(float v) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
  return v;
}

// Each turn polls shared memory in which the awaited value is already, then, with kSum, adds over the warp.
template <Poll kPoll, bool kSum>
__global__ void turns(long long* cycles, float* out) {
  __shared__ volatile uint32_t box[kThreads];
  box[threadIdx.x] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32, mine = threadIdx.x;
  float v = threadIdx.x * 0.001f;
  const long long began = clock64();
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    if constexpr (kPoll == Poll::kOneThread)
      if (lane == 3)
        while (box[mine] != 0) {
        }
    if constexpr (kPoll == Poll::kAllThreads)
      while (box[mine] != 0) {
      }
    if constexpr (kPoll == Poll::kVote)
      while (__any_sync(~0u, box[mine] != 0)) {
      }
    v = kSum ? over_warp(v) : v * 0.5f + 1;
  }
  if (threadIdx.x == 0) *cycles = clock64() - began;
  out[threadIdx.x] = v;
}

template <Poll kPoll, bool kSum>
void measure(const char* what) {
  long long *cycles, found = 0;
  float* out;
  cudaMalloc(&cycles, sizeof *cycles), cudaMalloc(&out, kThreads * sizeof *out);
  for (int warm = 0; warm < 2; ++warm) turns<kPoll, kSum><<<1, kThreads>>>(cycles, out);
  const cudaError_t code = cudaMemcpy(&found, cycles, sizeof found, cudaMemcpyDeviceToHost);
  std::printf("%-34s %5lld cycles a turn (%s)\n", what, found / kTurns, cudaGetErrorString(code));
  cudaFree(cycles), cudaFree(out);
}

int main() {
  measure<Poll::kNone, true>("a warp's sum");
  measure<Poll::kVote, true>("the warp polls by vote, sum");
  measure<Poll::kAllThreads, true>("each thread polls, sum");
  measure<Poll::kOneThread, true>("one thread polls, sum");
  measure<Poll::kOneThread, false>("one thread polls, no sum");
}
