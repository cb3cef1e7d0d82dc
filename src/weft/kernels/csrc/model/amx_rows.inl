// Products of many rows of bfloat16 numbers by AMX, with the bits of `product_tiles`. Rows that the second cache
// holds are packed in pairs of elements, and weights are multiplied with them as they lie. For more rows a panel of
// weights is packed, as large as that cache holds, and blocks of rows, in the first cache, are multiplied with it.

constexpr int64_t kPanel = 1 << 19;     // elements of a panel
constexpr int64_t kPanelInputs = 2048;  // its elements of an output
constexpr int64_t kBlockInputs = 288;   // elements of a row in a block
constexpr int64_t kTile = 16 * 32;      // elements of a tile
constexpr int64_t kSums = 32 * 32;      // of 32 rows and 32 outputs

constexpr int64_t kPackedRows = 5 << 17;  // elements of rows that are packed

// Checks if the rows are packed. Weights of few inputs are quicker packed, as sums are transposed.
inline bool packs_rows(const Product& c) {
  return c.rows * c.padded <= kPackedRows && (c.rows <= 128 || c.inputs >= 1024);
}

// Outputs of a panel.
inline int64_t panel_outputs(int64_t inputs) { return kPanel / std::min(inputs + 31, kPanelInputs) / 32 * 32; }

// Floats of memory for `many_rows`.
inline int64_t panel_floats(const Product& c, int64_t outputs) {
  if (c.wide) return 0;
  const int64_t blocks = c.inputs > kPanelInputs ? (c.rows + 31) / 32 : 1, width = (outputs + 31) / 32 * 32;
  return (width * std::min(c.padded, kPanelInputs) + 32 * kBlockInputs) / 2 + blocks * 32 * width;
}

WEFT_FN __mmask32 first_words(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : count <= 0 ? __mmask32{0} : __mmask32((uint32_t{1} << count) - 1);
}

// Stores the transpose of 16 × 16 numbers of 32 bits.
WEFT_TARGET inline void store_transposed(__m512i* x, bf16* to) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i) {  // x[4 · n + i]: columns i, i + 4, … of rows 4 · n …
    const __m512i a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    _mm512_storeu_si512(to + i * 32, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_storeu_si512(to + (i + 4) * 32, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_storeu_si512(to + (i + 8) * 32, _mm512_shuffle_i32x4(a, c, 0xdd));
    _mm512_storeu_si512(to + (i + 12) * 32, _mm512_shuffle_i32x4(b, d, 0xdd));
  }
}

// Fills a tile [16 pairs of elements, 16 rows] with elements of up to `rows` rows, and zeros.
WEFT_TARGET inline void pack_tile(const bf16* from, int64_t stride, int64_t rows, __mmask32 elements, bf16* to) {
  __m512i x[16];
  for (int64_t i = 0; i < 16; ++i)
    x[i] = i < rows ? _mm512_maskz_loadu_epi16(elements, from + i * stride) : _mm512_setzero_si512();
  store_transposed(x, to);
}

// Fills tiles [elements / 32, 2, 16 rows, 32] with elements begin … end − 1 of up to 32 rows, and zeros.
WEFT_TARGET inline void copy_rows(const Product& c, int64_t first, int64_t begin, int64_t end, bf16* to) {
  for (int64_t i = 0; i < 32; ++i, to += i == 16 ? kTile - 15 * 32 : 32) {
    const int64_t row = std::min(first + i, c.rows - 1);
    const bf16* x = static_cast<const bf16*>(c.x) + (c.from ? c.from[row] : row) * c.x_stride;
    for (int64_t k = begin; k < end; k += 32)
      _mm512_store_si512(to + (k - begin) * 32, _mm512_maskz_loadu_epi16(first_words(end - k), x + k));
  }
}

// Sums [32, 32] of rows first … and outputs begin … end − 1, which `next` writes as `finish` does, some rows at a time.
struct Finished {
  const Linear& c;
  int64_t first = 0, begin = 0, end = 0, row = 32;
  const float* sums = nullptr;

  WEFT_TARGET inline void next(int64_t rows) {
    const __m512i high = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                          25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    const __mmask32 outputs = first_words(end - begin);
    for (const int64_t stop = std::min(std::min<int64_t>(32, c.rows - first), row + rows); row < stop; ++row) {
      F a = load(sums + row * 32), b = load(sums + row * 32 + 16);
      if (c.bias) {
        alignas(64) bf16 bias[32];
        _mm512_store_si512(bias, _mm512_maskz_loadu_epi16(outputs, static_cast<const bf16*>(c.bias) + begin));
        a = add(a, load16(bias)), b = add(b, load16(bias + 16));
      }
      bf16* out = static_cast<bf16*>(c.out) + (first + row) * c.out_stride + begin;
      _mm512_mask_storeu_epi16(out, outputs, _mm512_permutex2var_epi16(rounded_bf16(a), high, rounded_bf16(b)));
    }
  }
};

// Transposes 16 × 16 sums between arrays of 32 columns.
WEFT_TARGET inline void transpose_sums(const float* from, float* to) {
  __m512i x[16];
  alignas(64) float transposed[16 * 16];
  for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(from + i * 32);
  store_transposed(x, static_cast<bf16*>(static_cast<void*>(transposed)));
  for (int i = 0; i < 16; ++i) save(to + i * 32, load(transposed + i * 16));
}

// Makes all tiles whole: 16 rows of 64 bytes.
WEFT_TARGET inline void use_whole_tiles() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = 16, shapes.bytes[tile] = 64;
  _tile_loadconfig(&shapes);
}

// Fills tiles 0 … 3 with sums [32, 32]; null: zeros.
WEFT_TARGET inline void begin_sums(const float* sums) {
  asm volatile("" ::: "memory");  // GCC's intrinsics do not say that they read memory
  if (!sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, sums, 128);
  _tile_loadd(1, sums + 16, 128);
  _tile_loadd(2, sums + kSums / 2, 128);
  _tile_loadd(3, sums + kSums / 2 + 16, 128);
}

WEFT_TARGET inline void store_sums(float* sums) {
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + kSums / 2, 128);
  _tile_stored(3, sums + kSums / 2 + 16, 128);
  asm volatile("" ::: "memory");
}

// Adds the products of two tiles of rows, `stride` bytes apart, and of the two tiles at `with` to tiles 0 … 3.
WEFT_TARGET inline void add_products(const bf16* rows, const bf16* more_rows, const bf16* with, int64_t stride = 64) {
  _tile_loadd(4, rows, stride);
  _tile_loadd(6, with, 64);
  _tile_loadd(7, with + kTile, 64);
  _tile_loadd(5, more_rows, stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// Adds the products of `tiles` tiles of 32 rows and of 32 outputs to sums [32, 32], and finishes earlier sums meanwhile.
// fresh: the sums are not read.
WEFT_TARGET inline void add_tiles(const bf16* x, const bf16* weight, int64_t tiles, bool fresh, float* sums,
                                  Finished& earlier) {
  begin_sums(fresh ? nullptr : sums);
  const int64_t each = (32 + tiles - 1) / tiles;
  for (; tiles; --tiles, x += 2 * kTile, weight += 2 * kTile) {
    add_products(x, x + kTile, weight);
    earlier.next(each);
  }
  store_sums(sums);
}

// Fills tiles [elements / 32, 2, 16 pairs of elements, 16 rows] of c.wide with rows first … first + 31, and zeros.
WEFT_TARGET inline void pack_block(const Product& c, int64_t first) {
  bf16* to = static_cast<bf16*>(static_cast<void*>(const_cast<float*>(c.wide))) + first * c.padded;
  for (int64_t i = 0; i < 32; i += 16, to += kTile) {
    const bf16* from[16];
    for (int64_t j = 0; j < 16; ++j) {
      const int64_t row = std::min(first + i + j, c.rows - 1);
      from[j] = static_cast<const bf16*>(c.x) + (c.from ? c.from[row] : row) * c.x_stride;
    }
    for (int64_t k = 0; k < c.inputs; k += 32) {
      __m512i x[16];
      for (int j = 0; j < 16; ++j) x[j] = _mm512_maskz_loadu_epi16(first_words(c.inputs - k), from[j] + k);
      store_transposed(x, to + k * 32);
    }
  }
}

// Computes outputs begin … end − 1 of packed rows.
WEFT_TARGET inline void packed_times_weights(const Linear& c, int64_t begin, int64_t end) {
  alignas(64) float sums[kSums], transposed[kSums];
  alignas(64) bf16 part[2][kTile];
  Finished earlier{c};
  const int64_t each = (32 * 32 + c.padded - 1) / c.padded;
  for (int64_t o = begin; o < end; o += 32) {
    const auto* rows = static_cast<const bf16*>(static_cast<const void*>(c.wide));
    const auto* weights = static_cast<const bf16*>(c.weight) + o * c.weight_stride;
    for (int64_t row = 0; row < c.rows; row += 32) {
      begin_sums(nullptr);
      for (int64_t k = 0; k < c.inputs; k += 32, rows += 2 * kTile) {
        const bf16 *weight = weights + k, *more = weight + 16 * c.weight_stride;
        const bool whole = end - o >= 32 && c.inputs - k >= 32;
        if (!whole) {
          const int64_t inputs = std::min<int64_t>(32, c.inputs - k), outputs = end - o;
          more = whole_tile(more, c.weight_stride, std::min<int64_t>(16, std::max<int64_t>(0, outputs - 16)), inputs,
                            part[1]);
          weight = whole_tile(weight, c.weight_stride, std::min<int64_t>(16, outputs), inputs, part[0]);
        }
        asm volatile("" ::: "memory");  // GCC's intrinsics do not say that they read memory
        add_products(weight, more, rows, whole ? c.weight_stride * 2 : 64);
        earlier.next(each);
      }
      earlier.next(32);
      store_sums(sums);
      for (int i = 0; i < 4; ++i)
        transpose_sums(sums + i / 2 * 512 + i % 2 * 16, transposed + i % 2 * 512 + i / 2 * 16);
      earlier.first = row, earlier.begin = o, earlier.end = std::min(end, o + 32), earlier.row = 0;
      earlier.sums = transposed;
    }
  }
  earlier.next(32);
}

// Computes outputs begin … end − 1 of all rows. They are a panel's; memory: see `panel_floats`. c.wide: all rows as
// `pack_block` packs them, or null.
WEFT_TARGET inline void many_rows(const Linear& c, int64_t begin, int64_t end, float* memory) {
  use_whole_tiles();
  if (c.wide) {
    packed_times_weights(c, begin, end);
    return _tile_release();
  }
  const int64_t pairs = (end - begin + 31) / 32;
  const bool deep = c.inputs > kPanelInputs;
  bf16* x = static_cast<bf16*>(static_cast<void*>(memory));
  bf16* panel = x + 32 * kBlockInputs;
  float* sums = memory + (32 * kBlockInputs + pairs * 32 * std::min(c.padded, kPanelInputs)) / 2;
  for (int64_t k = 0; k < c.inputs; k += kPanelInputs) {
    const int64_t stop = std::min(c.inputs, k + kPanelInputs), tiles = (stop - k + 31) / 32;
    const int64_t parts = (tiles * 32 + kBlockInputs - 1) / kBlockInputs, part = (tiles + parts - 1) / parts;
    for (int64_t o = 0; o < 32 * pairs; o += 16) {
      bf16* to = panel + o / 32 * tiles * 2 * kTile + o / 16 % 2 * kTile;
      const bf16* weight = static_cast<const bf16*>(c.weight) + (begin + o) * c.weight_stride;
      for (int64_t at = k; at < stop; at += 32, to += 2 * kTile)
        pack_tile(weight + at, c.weight_stride, end - begin - o, first_words(stop - at), to);
    }
    for (int64_t first = 0; first < c.rows; first += 32) {
      float* found = sums + (deep ? first * pairs * 32 : 0);
      for (int64_t tile = 0; tile < tiles; tile += part) {
        const int64_t last = std::min(tiles, tile + part);
        copy_rows(c, first, k + tile * 32, std::min(stop, k + last * 32), x);
        Finished earlier{c};
        for (int64_t p = 0; p < pairs; ++p) {
          float* each = found + p * kSums;
          add_tiles(x, panel + (p * tiles + tile) * 2 * kTile, last - tile, !k && !tile, each, earlier);
          if (stop < c.inputs || last < tiles) continue;
          earlier.first = first, earlier.begin = begin + p * 32, earlier.end = std::min(end, earlier.begin + 32);
          earlier.row = 0, earlier.sums = each;
        }
        earlier.next(32);
      }
    }
  }
  _tile_release();
}
