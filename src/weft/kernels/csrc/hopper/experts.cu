// The products of the routed experts for prompts in FP8, with a scale for each 128 columns of a row and each 128 × 128
// of a weight: a copy of the rows in the order of their experts, then two products.
//
// A block of threads computes a tile of 128 rows times 2 × 128 columns, for tile after tile. One warpgroup loads; two
// multiply, each 64 of the rows. Sums of 128 products leave the tensor cores, are scaled and added in float32
// (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). While one warpgroup does that, or stores its rows, the tensor cores
// multiply for the other one. What an item needs of global memory is loaded during the item before.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "tensor_core.cuh"

namespace ffi = tvm::ffi;
using ffi::TensorView;

namespace weft {
namespace {

constexpr int kTile = 128, kGroup = 128, kHalf = 64;  // rows of a tile, columns of a group, rows of a product
constexpr int kStages = 4, kThreads = 128;            // of a warpgroup
constexpr int kBlockBytes = kTile * kGroup, kScaleBytes = kTile * 4;
constexpr float kLargest = 448.0f, kSmallest = 1e-10f;  // as in weft/kernels/float8.py

// One of the two products. up: columns of gate and of up, which give one group of 128 columns of the next product's
// rows; otherwise 256 columns of a token's output.
struct Product {
  const int *order, *tile_expert, *used;  // pairs in the order of the tiles; expert of each tile; number of tiles
  const float *row_scale, *scale;         // [groups, rows] of the tiles' rows; [experts, blocks of 128 columns, groups]
  const float* share;                     // of each pair
  void *out, *out_scale;                  // up: float8 [rows, columns], float32 [groups, rows]; else [pairs, columns]
  int groups, columns, rows, pairs;       // 128s of depth; columns of out; rows of all tiles; pairs
  float limit;                            // of the activated values and of up, or infinity
  bool bfloat16;                          // out is, not float16
};

struct alignas(1024) Shared {
  char a[kStages][kBlockBytes], b[kStages][2][kBlockBytes];
  float row_scale[kStages][kTile];
  char staging[2][kHalf * kGroup * 2];  // of each multiplying warpgroup
  int pair[2][kHalf];
  uint64_t full[kStages], empty[kStages];
};

template <bool kUp>
__device__ void load(Shared& s, const Product& p, const CUtensorMap* a, const CUtensorMap* b, int items, int blocks) {
  uint32_t step = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int tile = item / blocks, block = item % blocks, expert = p.tile_expert[tile];
    const int first = kUp ? (expert * 2 * blocks + block) * kGroup : (expert * blocks + block) * 2 * kGroup;
    const int second = kUp ? first + blocks * kGroup : first + kGroup;
    for (int group = 0; group < p.groups; ++group, ++step) {
      const uint32_t stage = step % kStages, parity = step / kStages % 2;
      while (!has_passed(&s.empty[stage], parity ^ 1)) {
      }
      arrive_expecting(&s.full[stage], 3 * kBlockBytes + kScaleBytes);
      load_block(s.a[stage], a, group * kGroup, tile * kTile, &s.full[stage]);
      load_block(s.b[stage][0], b, group * kGroup, first, &s.full[stage]);
      load_block(s.b[stage][1], b, group * kGroup, second, &s.full[stage]);
      load_bytes(s.row_scale[stage], p.row_scale + size_t(group) * p.rows + tile * kTile, kScaleBytes, &s.full[stage]);
    }
  }
}

// Loaded here, not where the compiler would have it.
__device__ inline int load_now(const int* p) {
  int value;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(value) : "l"(p));
  return value;
}
__device__ inline float load_now(const float* p) {
  return __int_as_float(load_now(reinterpret_cast<const int*>(p)));
}

// Adds a · bᵀ, times the rows' scales `upper` and `lower`, for 64 rows, 128 columns and a depth of 128.
__device__ inline void add_block(float (&sum)[64], uint64_t a, uint64_t b, float upper, float lower) {
  float d[64];
  pin(d);
  begin_products();
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_add(d, a + 2 * k, b + 2 * k, k > 0);
  finish_products();
  pin(d);
#pragma unroll
  for (int i = 0; i < 64; ++i) sum[i] = __fmaf_rn(d[i], i % 4 < 2 ? upper : lower, sum[i]);
}

// silu(gate) · up within the limit, with the instructions that Triton has for exp and for a quotient.
__device__ inline float activated(float gate, float up, float limit) {
  float e, quotient;
  asm("ex2.approx.f32 %0, %1;" : "=f"(e) : "f"(-gate * 1.4426950408889634f));
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(gate), "f"(1.0f + e));
  return fminf(quotient, limit) * fminf(fmaxf(up, -limit), limit);
}

// A multiplying warpgroup's place: its half of a tile's rows, and a thread's first row of two, 8 apart, and its lane
// within these rows.
struct Place {
  int half, thread, row, lane, barrier;
};

// Stores 64 rows of 128 values in float8, each row with its scale. from: the first row, of all tiles.
__device__ inline void store_quantised(const float (&v)[64], char* staging, const Product& p, const Place& at, int from,
                                       int block) {
  constexpr int kPitch = kGroup + 16;  // rows in different banks
  float largest[2] = {kSmallest, kSmallest};
#pragma unroll
  for (int i = 0; i < 64; ++i) largest[i % 4 / 2] = fmaxf(largest[i % 4 / 2], fabsf(v[i]));
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    float& peak = largest[side];
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
    const float factor = __fdiv_rn(kLargest, peak);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float low = v[4 * j + 2 * side] * factor, high = v[4 * j + 2 * side + 1] * factor;
      uint16_t both;
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
      *reinterpret_cast<uint16_t*>(staging + (at.row + 8 * side) * kPitch + 8 * j + 2 * at.lane) = both;
    }
    if (at.lane == 0)
      static_cast<float*>(p.out_scale)[size_t(block) * p.rows + from + at.row + 8 * side] = __fdiv_rn(peak, kLargest);
  }
  sync_named(at.barrier, kThreads);
  char* out = static_cast<char*>(p.out) + size_t(from) * p.columns + block * kGroup;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * (kThreads / 8) + at.thread / 8, unit = at.thread % 8 * 16;
    *reinterpret_cast<uint4*>(out + size_t(row) * p.columns + unit) =
        *reinterpret_cast<const uint4*>(staging + row * kPitch + unit);
  }
  sync_named(at.barrier, kThreads);
}

// Stores 64 rows of 128 columns in 16 bits, times the shares of the thread's two rows, in the places of `pair`.
// column: the first.
__device__ inline void store_pairs(const float (&v)[64], char* staging, const int* pair, const float (&share)[2],
                                   const Product& p, const Place& at, int column) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    const int row = at.row + 8 * side;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float low = v[4 * j + 2 * side] * share[side], high = v[4 * j + 2 * side + 1] * share[side];
      // Units of 16 bytes change places, so that eight rows are in different banks.
      void* to = staging + row * 256 + ((j ^ (row & 7)) * 16) + 4 * at.lane;
      if (p.bfloat16)
        *static_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(low, high);
      else
        *static_cast<__half2*>(to) = __floats2half2_rn(low, high);
    }
  }
  sync_named(at.barrier, kThreads);
  const int unit = at.thread % 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i * (kThreads / 16) + at.thread / 16, place = pair[row];
    if (place < p.pairs)
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + size_t(place) * p.columns + column + unit * 8) =
          *reinterpret_cast<const uint4*>(staging + row * 256 + ((unit ^ (row & 7)) * 16));
  }
  sync_named(at.barrier, kThreads);
}

template <bool kUp>
__device__ void multiply(Shared& s, const Product& p, int items, int blocks) {
  const int half = threadIdx.x / kThreads, thread = threadIdx.x % kThreads;
  const Place at{half, thread, thread / 32 * 16 + thread % 32 / 4, thread % 4, 1 + half};
  const auto expert_of = [&](int item) { return load_now(p.tile_expert + item / blocks); };
  const auto first_row = [&](int item) { return item / blocks * kTile + half * kHalf; };
  uint32_t step = 0;
  int item = blockIdx.x;
  if (item >= items) return;
  int expert = expert_of(item), first = load_now(p.order + first_row(item));
  int pair[2] = {load_now(p.order + first_row(item) + at.row), load_now(p.order + first_row(item) + at.row + 8)};
  for (; item < items; item += gridDim.x) {
    const int block = item % blocks, from = first_row(item), next = min(item + int(gridDim.x), items - 1);
    const bool any = first < p.pairs;  // of the half's rows has a pair
    const float* scale = p.scale + size_t(kUp ? expert * 2 * blocks + block : (expert * blocks + block) * 2) * p.groups;
    const float* second_scale = scale + size_t(kUp ? blocks : 1) * p.groups;
    float share[2] = {};
    if (!kUp) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        share[side] = pair[side] < p.pairs ? load_now(p.share + pair[side]) : 0.0f;
        if (at.lane == 0) s.pair[half][at.row + 8 * side] = pair[side];
      }
    }
    expert = expert_of(next), first = load_now(p.order + first_row(next));
    pair[0] = load_now(p.order + first_row(next) + at.row), pair[1] = load_now(p.order + first_row(next) + at.row + 8);
    float sum[2][64] = {};
    float one = scale[0], two = second_scale[0];
    for (int group = 0; group < p.groups; ++group, ++step) {
      const uint32_t stage = step % kStages, parity = step / kStages % 2;
      const int after = min(group + 1, p.groups - 1);
      const float one_after = scale[after], two_after = second_scale[after];
      while (!has_passed(&s.full[stage], parity)) {
      }
      if (any) {
        const uint64_t a = operand(s.a[stage] + half * kHalf * kGroup);
        const float* row_scale = s.row_scale[stage] + half * kHalf + at.row;
        const float upper = row_scale[0], lower = row_scale[8];
        add_block(sum[0], a, operand(s.b[stage][0]), upper * one, lower * one);
        add_block(sum[1], a, operand(s.b[stage][1]), upper * two, lower * two);
      }
      one = one_after, two = two_after;
      if (thread % 32 == 0) arrive_at(&s.empty[stage]);
    }
    if (!any) continue;
    if constexpr (kUp) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[0][i] = activated(sum[0][i], sum[1][i], p.limit);
      store_quantised(sum[0], s.staging[half], p, at, from, block);
    } else {
      store_pairs(sum[0], s.staging[half], s.pair[half], share, p, at, 2 * block * kGroup);
      store_pairs(sum[1], s.staging[half], s.pair[half], share, p, at, (2 * block + 1) * kGroup);
    }
  }
}

template <bool kUp>
__global__ void __launch_bounds__(3 * kThreads, 1)
    products(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const Product p) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int blocks = p.columns / (kUp ? kGroup : 2 * kGroup), items = *p.used * blocks;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&s.full[stage], 1);
      init_barrier(&s.empty[stage], 2 * kThreads / 32);
    }
  __syncthreads();
  if (threadIdx.x >= 2 * kThreads) {
    give_registers<24>();
    if (threadIdx.x == 2 * kThreads) load<kUp>(s, p, &a, &b, items, blocks);
  } else {
    take_registers<240>();
    multiply<kUp>(s, p, items, blocks);
  }
}

constexpr int kCopied = 32;  // rows that a block of threads copies

// The rows of the tiles, and their scales by group. A row without a pair is a copy of the first token's.
__global__ void __launch_bounds__(256) copy_rows(const int* order, const int* used, const char* x, const float* x_scale,
                                                 char* rows, float* row_scale, int k, int pairs, int groups, int all,
                                                 int64_t x_row) {
  const int from = blockIdx.x * kCopied;
  if (from >= *used * kTile) return;
  for (int i = threadIdx.x / 32; i < kCopied; i += 8) {
    const int pair = order[from + i];
    const uint4* source = reinterpret_cast<const uint4*>(x + (pair < pairs ? pair / k : 0) * x_row);
    uint4* to = reinterpret_cast<uint4*>(rows + size_t(from + i) * groups * kGroup);
    for (int unit = threadIdx.x % 32; unit < groups * kGroup / 16; unit += 32) to[unit] = source[unit];
  }
  const int pair = order[from + threadIdx.x % 32], token = pair < pairs ? pair / k : 0;
  for (int group = threadIdx.x / 32; group < groups; group += 8)
    row_scale[size_t(group) * all + from + threadIdx.x % 32] = x_scale[size_t(token) * groups + group];
}

void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) TVM_FFI_THROW(WeftCallError) << what << ": " << cudaGetErrorString(code);
}

// The matrix [rows, columns] of bytes, loaded in blocks of 128 × 128.
CUtensorMap matrix(const TensorView& values, int64_t rows, int64_t columns) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static void* encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult how;
    const char* name = "cuTensorMapEncodeTiled";
    check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &how), "the driver");
    if (!found) TVM_FFI_THROW(WeftCallError) << "the driver knows no tensor maps: it is older than CUDA 12.0";
    return found;
  }();
  CUtensorMap map;
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[] = {cuuint64_t(columns)};
  const cuuint32_t box[] = {kGroup, kTile}, steps[] = {1, 1};
  const CUresult done = reinterpret_cast<Encode>(encode)(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, values.data_ptr(), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (done != CUDA_SUCCESS) TVM_FFI_THROW(WeftCallError) << "tensor map of " << rows << " × " << columns << ": " << done;
  return map;
}

template <bool kUp>
void launch(const CUtensorMap& a, const CUtensorMap& b, const Product& p, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
  static int multiprocessors = [] {
    int device = 0, found = 0;
    check(cudaGetDevice(&device), "the device");
    check(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device), "the device");
    check(cudaFuncSetAttribute(products<kUp>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "shared memory");
    return found;
  }();
  products<kUp><<<multiprocessors, 3 * kThreads, kBytes, stream>>>(a, b, p);
  check(cudaGetLastError(), "a product of experts");
}

// Fills out [pairs, width]: weft/engine/kernels/hopper_experts.py has the arguments.
void experts(TensorView x, TensorView x_scale, TensorView order, TensorView tile_expert, TensorView used,
             TensorView share, TensorView gate_up, TensorView gate_up_scale, TensorView down, TensorView down_scale,
             TensorView rows, TensorView row_scale, TensorView hidden, TensorView hidden_scale, TensorView out,
             int64_t k, double limit, bool bfloat16, int64_t stream_) {
  const auto stream = reinterpret_cast<cudaStream_t>(stream_);
  const int held = down.size(0), width = down.size(1), inner = down.size(2), all = order.size(0), pairs = x.size(0) * k;
  const int* order_ = static_cast<const int*>(order.data_ptr());
  const int* used_ = static_cast<const int*>(used.data_ptr());
  float* row_scale_ = static_cast<float*>(row_scale.data_ptr());
  copy_rows<<<(all + kCopied - 1) / kCopied, 256, 0, stream>>>(
      order_, used_, static_cast<const char*>(x.data_ptr()), static_cast<const float*>(x_scale.data_ptr()),
      static_cast<char*>(rows.data_ptr()), row_scale_, int(k), pairs, width / kGroup, all, x.stride(0));
  check(cudaGetLastError(), "the copy of rows");
  Product p{order_, static_cast<const int*>(tile_expert.data_ptr()), used_, row_scale_,
            static_cast<const float*>(gate_up_scale.data_ptr()), nullptr, hidden.data_ptr(), hidden_scale.data_ptr(),
            width / kGroup, inner, all, pairs, float(limit), bfloat16};
  launch<true>(matrix(rows, all, width), matrix(gate_up, int64_t(held) * 2 * inner, width), p, stream);
  p.row_scale = static_cast<const float*>(hidden_scale.data_ptr());
  p.scale = static_cast<const float*>(down_scale.data_ptr());
  p.share = static_cast<const float*>(share.data_ptr());
  p.out = out.data_ptr(), p.out_scale = nullptr, p.groups = inner / kGroup, p.columns = width;
  launch<false>(matrix(hidden, all, inner), matrix(down, int64_t(held) * width, inner), p, stream);
}

}  // namespace
}  // namespace weft

TVM_FFI_DLL_EXPORT_TYPED_FUNC(experts, weft::experts)
