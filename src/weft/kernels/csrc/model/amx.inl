// Products of bfloat16 numbers by AMX: a tile has 32 elements of 16 weights, or of all rows. Sums are added in order of
// pairs of elements, whatever the number of rows.

constexpr int kTiles = 3;        // of outputs at a time: sums are added while others wait
constexpr int64_t kAhead = 256;  // elements from a weight to the one that is prefetched

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Fills c.wide with blocks of 16 pairs of elements, each pair of all rows.
inline void pack_rows(const Product& c, float* to) {
  const auto from = static_cast<const bf16*>(c.x);
  const auto pairs = static_cast<bf16*>(static_cast<void*>(to));
  for (int64_t row = 0; row < c.rows; ++row) {
    const bf16* x = from + (c.from ? c.from[row] : row) * c.x_stride;
    for (int64_t k = 0; k < c.padded; ++k) pairs[(k / 2 * c.rows + row) * 2 + k % 2] = k < c.inputs ? x[k] : bf16{0};
  }
}

// Copies a part of a tile's weights, and zeros.
inline const bf16* whole_tile(const bf16* weight, int64_t stride, int64_t outputs, int64_t inputs, bf16* to) {
  std::memset(static_cast<void*>(to), 0, 16 * 32 * sizeof(bf16));
  for (int64_t o = 0; o < outputs; ++o)
    std::memcpy(static_cast<void*>(to + o * 32), weight + o * stride, size_t(inputs) * sizeof(bf16));
  return to;
}

// Stores the sums of 16 outputs [16, rows].
WEFT_TARGET inline void store_tile(const Product& c, const float* totals, float* found) {
  const __m512i at = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                        _mm512_set1_epi32(int(c.rows)));
  for (int64_t row = 0; row < c.rows; ++row) save(found + row * kMaxChunk, _mm512_i32gather_ps(at, totals + row, 4));
}

WEFT_TARGET inline void product_tiles(const Product& c, int64_t begin, int64_t end, float* found) {
  const int64_t width = c.rows * 4;
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = 16, shapes.bytes[tile] = uint16_t(width);
  for (int tile = kTiles; tile < 2 * kTiles; ++tile) shapes.bytes[tile] = 64;
  _tile_loadconfig(&shapes);
  const auto weights = static_cast<const bf16*>(c.weight);
  const auto x = reinterpret_cast<const char*>(c.wide);
  for (int64_t output = begin; output < end; output += 16 * kTiles) {
    alignas(64) bf16 part[kTiles][16 * 32];
    const bf16* first = weights + output * c.weight_stride;
    const int64_t left = end - output;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t k = 0; k < c.inputs; k += 32) {
      const bf16* from[kTiles];
      int64_t strides[kTiles];
      for (int tile = 0; tile < kTiles; ++tile) {
        const int64_t outputs = std::min<int64_t>(16, std::max<int64_t>(0, left - 16 * tile));
        from[tile] = first + 16 * tile * c.weight_stride + k, strides[tile] = c.weight_stride * 2;
        if (outputs == 16 && k + 32 <= c.inputs) {
          const int64_t ahead = k + kAhead < c.inputs ? kAhead : 16 * kTiles * c.weight_stride + kAhead - c.inputs;
          for (int o = 0; o < 16; ++o) __builtin_prefetch(from[tile] + o * c.weight_stride + ahead);
        } else {
          const int64_t inputs = std::min<int64_t>(32, c.inputs - k);
          from[tile] = whole_tile(from[tile], c.weight_stride, outputs, inputs, part[tile]), strides[tile] = 64;
        }
      }
      asm volatile("" ::: "memory");  // GCC's intrinsics do not say that they read memory
      _tile_loadd(6, x + k / 2 * width, width);
      _tile_loadd(3, from[0], strides[0]);
      _tile_loadd(4, from[1], strides[1]);
      _tile_loadd(5, from[2], strides[2]);
      _tile_dpbf16ps(0, 3, 6);
      _tile_dpbf16ps(1, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
    }
    alignas(64) float totals[kTiles][16 * 16];
    _tile_stored(0, totals[0], width);
    _tile_stored(1, totals[1], width);
    _tile_stored(2, totals[2], width);
    for (int64_t tile = 0; tile < kTiles && 16 * tile < left; ++tile)
      store_tile(c, totals[tile], found + output - begin + 16 * tile);
  }
  _tile_release();
}

inline void rows_of_tiles(const Product& c, float* to) {
  c.weight_dtype == DType::bf16 ? pack_rows(c, to) : widen_rows(c, to);
}
inline void product_by_tiles(const Product& c, int64_t begin, int64_t end, float* found) {
  c.weight_dtype == DType::bf16 ? product_tiles(c, begin, end, found) : product(c, begin, end, found);
}
