// The epilogue: residual add and RMSNorm (arXiv 1910.07467), one cluster of blocks for each row.
#pragma once

#include <cuda_fp8.h>

#include "reduce.cuh"

namespace weft {

__device__ inline float sum_over_warp(float value) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

// The share of a row that each of a cluster's blocks has, from one thread's view.
template <class K>
struct InRow {
  const K& k;
  const uint32_t cluster = 1u << k.c.log2_cluster, block = blockIdx.x & (cluster - 1);
  const uint32_t step = k.workers() << k.c.log2_cluster, start = block * k.workers() + threadIdx.x;
  const uint32_t slices = (k.row_units + kSliceUnits - 1) / kSliceUnits;  // of the row
  // True if the block with this thread's lane as its number has a share of the row.
  const bool has_part = threadIdx.x % 32 < cluster && threadIdx.x % 32 * k.workers() < k.row_units;

  // Slices that this block sums.
  __device__ uint32_t own_slices() const {
    const uint32_t warps = k.workers() / kSliceUnits, in_a_round = warps << k.c.log2_cluster;
    const uint32_t rest = slices % in_a_round, begin = block * warps;
    return slices / in_a_round * warps + (rest > begin ? min(rest - begin, warps) : 0);
  }
};

// A row's sums of squares, one for each slice, which the warps of a cluster exchange. Two rows' sums lie apart, with a
// barrier each: a warp that stores its sum of a row has waited for all sums of the previous row, so all warps have read
// those of the row before that, which lie in the same place.
struct alignas(16) RowSums {
  float of_slice[2][kMaxSlices];
  uint64_t complete[2];

  // Called by all threads of a block, which must synchronise after it. of_block: slices that this block sums.
  __device__ void init(uint32_t slices, uint32_t of_block) {
    // `total` adds four at a time.
    const uint32_t last = slices + threadIdx.x % 4;
    if (threadIdx.x < 8 && last < kMaxSlices) of_slice[threadIdx.x / 4][last] = 0;
    if (threadIdx.x < 2) init_barrier(&complete[threadIdx.x], max(of_block, 1u));
  }

  // Stores a warp's sum of a slice of the row of this number in all blocks that have a share of it, one for each lane.
  // from_others: bytes of such sums that other blocks send. Memory order: the value goes with its barrier, in this
  // block by an arrival (release), in others by a store that the barrier there counts. A release at the cluster's scope
  // would wait until data that was pushed to other GPUs has arrived.
  template <class K>
  __device__ void publish(const InRow<K>& in, uint32_t row, uint32_t slice, float value, uint32_t from_others) {
    const uint32_t to = threadIdx.x % 32;
    float* const place = &of_slice[row % 2][slice];
    uint64_t* const barrier = &complete[row % 2];
    __syncwarp();  // all lanes have read the sums of the previous row
    if (to == in.block) {
      *place = value;
      // The first warp announces the bytes from other blocks: no phase passes without its arrival.
      if (threadIdx.x < 32 && slice * kSliceUnits < in.step && from_others)
        arrive_expecting(barrier, from_others);
      else
        arrive_at(barrier);
    } else if (in.has_part) {
      store_in_block(to, place, value, barrier);
    }
  }

  // The sum over all slices, which each thread computes for itself, in the same order (acquire).
  __device__ float total(uint32_t row, uint32_t slices) {
    while (!has_passed(&complete[row % 2], (row - 1) / 2 % 2)) {
    }
    float sum[4] = {};
#pragma unroll 8
    for (uint32_t slice = 0; slice < slices; slice += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&of_slice[row % 2][slice]);
      sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
};

// The rows of a cluster, one at a time. In two shots the result's strips alternate, since all of them arrive at once.
struct Rows {
  uint32_t next, strips, each, by;  // each: maximum rows of a strip; by: clusters, each of which has one row at a time
};
template <class K>
__device__ Rows rows_of_cluster(const K& k) {
  Rows r{(blockIdx.x - k.c.write.first) >> k.c.log2_cluster, 1, 0, uint32_t(k.c.write.count) >> k.c.log2_cluster};
  if constexpr (K::kAlgorithm == Algorithm::kTwoShot) {
    r.strips = uint32_t(k.scatters ? k.c.exchange.span : k.c.n);
    r.each = (k.l.out / k.row_units + r.strips - 1) / r.strips;
  }
  return r;
}
// The cluster's next row; one beyond the result if there is none.
template <class K>
__device__ uint32_t next_row(const K& k, Rows& r) {
  if constexpr (K::kAlgorithm == Algorithm::kTwoShot) {
    for (; r.next < r.strips * r.each; r.next += r.by)
      if (const uint32_t row = r.next % r.strips * r.each + r.next / r.strips; row * k.row_units < k.l.out) return row;
    return r.strips * r.each;
  }
  return r.next;
}

// A thread's unit of the epilogue's inputs, without the sum.
struct RowUnit {
  Unit residual, weight[2];  // two if they are wide
};
template <class K>
__device__ void load_weight(const K& k, uint32_t u, RowUnit& r) {
  if (!k.c.wide_weight) {
    r.weight[0] = k.load(k.c.weight, u);
    return;
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i)
    if (const uint32_t half = 2 * u + i; half * kUnit < 2 * k.row_bytes)
      r.weight[i] = load_local<K::kWhole>(k.c.weight, half, 2 * k.row_units, 2 * k.row_bytes);
}
template <class K>
__device__ void load_row_unit(const K& k, uint32_t row, uint32_t u, RowUnit& r) {
  if (u >= k.row_units || row * k.row_units >= k.l.out) return;
  r.residual = k.load(k.c.residual, row * k.row_units + u);
  load_weight(k, u, r);
}
template <class K>
__device__ void load_first_row(const K& k, RowUnit& r) {
  Rows all = rows_of_cluster(k);
  load_row_unit(k, next_row(k, all), InRow<K>{k}.start, r);
}

template <class E>
__device__ Unit normed(const RowUnit& r, float scale, bool wide_weight) {
  float f[E::count], w[E::count];
  E::widen(r.residual, f);
#pragma unroll
  for (int i = 0; i < E::count; ++i) f[i] *= scale;
  if (E::count == 8 && wide_weight) {
#pragma unroll
    for (int i = 0; i < E::count / 4; ++i) Elements<float>::widen(r.weight[i], w + 4 * i);
  } else {
    const Unit rounded = E::narrow(f);
    E::widen(rounded, f), E::widen(r.weight[0], w);
  }
#pragma unroll
  for (int i = 0; i < E::count; ++i) f[i] *= w[i];
  return E::narrow(f);
}

// A unit of a normalised row in eight bits (OCP FP8 E4M3): the largest magnitude of its group of columns, which lie
// side by side in this warp, becomes 448, bit for bit as in weft/kernels/float8.py. mine: as for `sum`.
template <class K>
__device__ void quantise(const K& k, uint32_t row, uint32_t u, bool mine, const Unit& unit) {
  using E = typename K::E;
  const uint32_t width = k.row_bytes / sizeof(typename K::T), at = u * E::count, group = 1u << k.c.log2_quant_group;
  float f[E::count], largest = 1e-10f;  // so that a group of zeros has a scale
  E::widen(unit, f);
#pragma unroll
  for (int i = 0; i < E::count; ++i)
    if (mine && (K::kWhole || at + i < width)) largest = fmaxf(largest, fabsf(f[i]));
  for (uint32_t by = 1; by * E::count < group; by *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, by));
  if (!mine) return;
  const uint32_t groups = (width + group - 1) >> k.c.log2_quant_group;
  if ((at & (group - 1)) == 0) k.c.scales[row * groups + (at >> k.c.log2_quant_group)] = __fdiv_rn(largest, 448.0f);
  const float factor = __fdiv_rn(448.0f, largest);
  uint32_t q[E::count / 4];
#pragma unroll
  for (int i = 0; i < E::count; i += 2) {
    const float2 two{f[i] * factor, f[i + 1] * factor};
    const uint32_t half = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3);
    q[i / 4] = i % 4 ? q[i / 4] | half << 16 : half;
  }
  char* out = k.c.quantised + int64_t(row) * width + at;
  if constexpr (K::kWhole && E::count == 8) {
    *reinterpret_cast<uint2*>(out) = make_uint2(q[0], q[1]);
  } else if constexpr (K::kWhole) {
    *reinterpret_cast<uint32_t*>(out) = q[0];
  } else {
#pragma unroll
    for (int i = 0; i < E::count; ++i)
      if (at + i < width) out[i] = char(q[i / 4] >> 8 * (i % 4));
  }
}

// residual_out = residual + value; out = weight · round(residual_out / √(mean of squares + eps)); a wide weight is
// multiplied by the value before rounding. With kQuantise, out in eight bits, too.
// Squares are summed within slices, then over slices: the same bits for any number of threads of a row.
// r: loaded for the first row. If a row has more than one unit for each thread, the other units are read again.
template <class K>
__device__ void write_normed(const K& k, RowUnit& r, RowSums& sums) {
  using E = typename K::E;
  const Call& c = k.c;
  const InRow<K> in{k};
  const int width = int(k.row_bytes / sizeof(typename K::T));
  const uint32_t from_others = sizeof(float) * (in.slices - in.own_slices());
  const bool more = k.row_units > in.step;
  if (k.first_of_warp(in.start) >= k.row_units) return;  // no part in any row
  Rows all = rows_of_cluster(k);
#pragma unroll 1
  for (uint32_t row = next_row(k, all), number = 1; row * k.row_units < k.l.out; ++number) {
    const uint32_t begin = row * k.row_units;
#pragma unroll 1
    for (uint32_t u = in.start; k.first_of_warp(u) < k.row_units; u += in.step) {
      const bool mine = u < k.row_units;
      float squares = 0;
      if (u >= in.step) load_row_unit(k, row, u, r);
      const Unit delta = value(k, mine, begin + u);
      if (mine) {
        float f[E::count], d[E::count];
        E::widen(delta, d), E::widen(r.residual, f);
#pragma unroll
        for (int i = 0; i < E::count; ++i) f[i] += d[i];
        r.residual = E::narrow(f);
        k.store(c.residual_out, begin + u, r.residual);
        E::widen(r.residual, f);
#pragma unroll
        for (int i = 0; i < E::count; ++i)
          if (K::kWhole || int(u) * E::count + i < width) squares += f[i] * f[i];
      }
      sums.publish(in, number, u / kSliceUnits, sum_over_warp(squares), from_others);
    }
    const float scale = rsqrtf(sums.total(number, in.slices) * c.inverse_width + c.eps);
#pragma unroll 1
    for (uint32_t u = in.start; (K::kQuantise ? k.first_of_warp(u) : u) < k.row_units; u += in.step) {
      const bool mine = u < k.row_units;
      if (more && mine) r.residual = k.load(c.residual_out, begin + u), load_weight(k, u, r);
      const Unit result = normed<E>(r, scale, c.wide_weight);
      if (mine) k.store(c.out, begin + u, result);
      if (K::kQuantise && c.quantised) quantise(k, row, u, mine, result);
    }
    all.next += all.by;
    row = next_row(k, all);
    load_row_unit(k, row, in.start, r);
  }
}

}  // namespace weft
