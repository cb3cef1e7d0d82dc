// Hopper's tensor cores and its loads of blocks of a matrix (TMA), which CUDA C++ has no name for. The instructions and
// the layout of their operands are those of the PTX ISA's chapters on wgmma and cp.async.bulk.
#ifndef WEFT_TENSOR_CORE_CUH
#define WEFT_TENSOR_CORE_CUH

#include <cuda.h>

#include "ptx.cuh"

namespace weft {

// --- loads into the block's shared memory; the barrier counts their bytes ------------------------------------------------

// The block of `map` that begins at (column, row). One thread calls it.
__device__ inline void load_block(void* to, const CUtensorMap* map, int column, int row, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(shared_address(to)), "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}
// `bytes` bytes, a multiple of 16, from an address that is one too.
__device__ inline void load_bytes(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// --- products by a warpgroup: four warps, the first of them a multiple of four -------------------------------------------

// The operand that begins at p: rows of 128 bytes, in the swizzle of a CUtensorMap of 128 bytes. Eight rows are 1,024
// bytes, at a multiple of 1,024. The next 32 bytes of all rows are at operand + 2.
__device__ inline uint64_t operand(const void* p) {
  return uint64_t((shared_address(p) & 0x3FFFF) >> 4) | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
// Registers that earlier instructions wrote may be the products' from here on.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void finish_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// Keeps the compiler from moving reads and writes of a product's registers across the calls above.
__device__ inline void pin(float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define WEFT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WEFT_16(d, i) WEFT_4(d, i), WEFT_4(d, i + 4), WEFT_4(d, i + 8), WEFT_4(d, i + 12)
// d = a · bᵀ, plus d if `add`: 64 rows of a, 128 of b, 32 columns of float8_e4m3. In d, thread t has the rows
// 16 · (t / 32) + t % 32 / 4 (elements 4 · j, 4 · j + 1) and 8 further (the next two), in the columns
// 8 · j + 2 · (t % 4) and the next.
__device__ inline void multiply_add(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1;\n}"
      : WEFT_16(d, 0), WEFT_16(d, 16), WEFT_16(d, 32), WEFT_16(d, 48)
      : "l"(a), "l"(b), "r"(int(add)));
}
#undef WEFT_16
#undef WEFT_4

// Registers of each of the warpgroup's threads from here on.
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace weft

#endif
