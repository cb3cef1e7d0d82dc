// Attention of prompts of bfloat16 numbers by AMX, for 32 rows of a head at a time: scores [tokens, rows], so that the
// softmax of a row is a lane's, and outputs [dim, rows]. Sums and greatest scores change after kSeen tokens from the first
// on, so that a row's bits depend on no other row.

// Numbers of tiles, and floats of memory of each kind.
struct PromptSizes {
  int64_t depth, values, tokens;  // tiles of 32 elements, of 16 elements of a value (even), and of 16 tokens (even)
  explicit PromptSizes(const Prompt& c)
      : depth(c.padded / 32), values(c.padded_value / 16), tokens((c.tokens + 31) / 32 * 2) {}
  int64_t keys() const { return tokens * depth * kTile / 2; }
  int64_t both() const { return keys() + tokens / 2 * values * kTile / 2; }  // keys and values of a head
  int64_t scores() const { return kSeen * 32; }
  int64_t work() const { return scores() + (kSeen + depth * 32) * 16 + values * 512 + 64; }
};

// Packs 32 tokens of a key-value head: keys in tiles [16 tokens, 32 elements], values in tiles [16 elements, 32 tokens].
WEFT_TARGET inline void pack_tokens(const Prompt& c, int64_t kv, int64_t first, float* memory) {
  const PromptSizes size(c);
  bf16* keys = static_cast<bf16*>(static_cast<void*>(memory + kv * size.both()));
  bf16* values = keys + 2 * size.keys();
  const auto is = [&](int64_t t) { return t >= c.skipped && t < c.tokens; };
  const auto slot = [&](int64_t t) { return c.slots ? int64_t(c.slots[t - c.skipped]) : t - c.skipped; };
  for (int64_t t = first; t < first + 32; ++t) {
    bf16* to = keys + t / 16 * size.depth * kTile + t % 16 * 32;
    const bf16* from = static_cast<const bf16*>(c.keys) + (is(t) ? slot(t) * c.key_slot + kv * c.key_head : 0);
    for (int64_t d = 0; d < c.padded; d += 32)
      _mm512_storeu_si512(to + d * 16, _mm512_maskz_loadu_epi16(is(t) ? first_words(c.dim - d) : 0, from + d));
  }
  bf16* to = values + first / 32 * size.values * kTile;
  const bf16* from = static_cast<const bf16*>(c.values) + kv * c.value_head;
  for (int64_t d = 0; d < c.padded_value; d += 16, to += kTile) {
    __m512i x[16];
    const __mmask16 elements = __mmask16(first_words(c.value_dim - d));
    for (int64_t i = 0; i < 16; ++i) {
      const auto wide = [&](int64_t t) WEFT_TARGET {
        if (!is(t)) return _mm512_setzero_si512();
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(elements, from + slot(t) * c.value_slot + d));
      };
      x[i] = _mm512_or_si512(wide(first + 2 * i), _mm512_slli_epi32(wide(first + 2 * i + 1), 16));
    }
    store_transposed(x, to);
  }
}

// Fills scores [32, 32] of two tiles of tokens.
WEFT_TARGET inline void score_tiles(const bf16* keys, const bf16* q, int64_t depth, float* scores) {
  begin_sums(nullptr);
  for (int64_t d = 0; d < depth; ++d, keys += kTile, q += 2 * kTile) add_products(keys, keys + depth * kTile, q);
  store_sums(scores);
}

// Adds weighted values of `blocks` blocks of 32 tokens to two tiles of outputs [16 elements, 32 rows].
WEFT_TARGET inline void value_tiles(const bf16* values, int64_t stride, const bf16* weights, int64_t blocks,
                                    float* out) {
  begin_sums(out);
  for (; blocks; --blocks, values += stride, weights += 2 * kTile) add_products(values, values + kTile, weights);
  store_sums(out);
}

// 2^x for x up to 127; 0 below -126.
WEFT_FN F power(F x) {
  const F n = nearest(x), r = sub(x, n);
  F p = all(1.5403530e-4f);
  for (const float factor : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    p = fma(p, r, all(factor));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all(-126.0f), _CMP_NLT_UQ), p, n);
}

// Turns scores [tokens, 32] of 16 rows into weights, in tiles [16 pairs of tokens, 16 rows], and returns the factor of
// earlier sums. limit: a row sees tokens from limit − window to limit − 1; hides: some row does not see all tokens.
WEFT_TARGET inline F softmax_of(const Prompt& c, int64_t first, int64_t tokens, bool hides, __m512i limit,
                                float* scores, bf16* weights, float* top, float* total) {
  const F before = load(top), scale = all(c.scale * 1.44269504f);
  F highest = before;
  for (int64_t t = 0; t < tokens; ++t) {
    F score = load(scores + t * 32);
    if (hides) {
      const __m512i left = _mm512_sub_epi32(limit, _mm512_set1_epi32(int(first + t)));  // 1 for the last token
      const __mmask16 seen = _mm512_cmpgt_epi32_mask(left, _mm512_setzero_si512()) &
                             _mm512_cmple_epi32_mask(left, _mm512_set1_epi32(int(c.window)));
      score = _mm512_mask_mov_ps(all(-INFINITY), seen, score);
      save(scores + t * 32, score);
    }
    highest = max(score, highest);
  }
  // A few powers of two above the base do no harm, and a new base costs a product of all outputs.
  const __mmask16 rises = _mm512_cmp_ps_mask(mul(sub(highest, before), scale), all(8.0f), _CMP_GT_OQ);
  const F base = _mm512_mask_mov_ps(before, rises, highest), minus = mul(sub(all(0.0f), base), scale);
  F sums = all(0.0f);
  const __m512i half = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32(int(0xffff0000));
  for (int64_t t = 0; t < tokens; t += 2) {
    const F even = power(fma(load(scores + t * 32), scale, minus));
    const F odd = power(fma(load(scores + t * 32 + 32), scale, minus));
    sums = add(add(sums, even), odd);
    const __m512i left = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
    const __m512i right = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(odd), half), high);
    _mm512_store_si512(weights + t / 32 * 2 * kTile + t % 32 / 2 * 32, _mm512_or_si512(left, right));
  }
  const F factor = power(mul(sub(before, base), scale));
  save(top, base), save(total, fma(load(total), factor, sums));
  return factor;
}

// Attention of rows first … first + 31 of a head. packed: see `pack_tokens`. memory: PromptSizes.work() floats.
WEFT_TARGET inline void attend_rows(const Prompt& c, int64_t head, int64_t first, const float* packed, float* memory) {
  use_whole_tiles();
  const PromptSizes size(c);
  const int64_t kv = head / (c.heads / c.kv_heads), rows = std::min<int64_t>(32, c.rows - first);
  const auto keys = static_cast<const bf16*>(static_cast<const void*>(packed + kv * size.both()));
  const bf16* values = keys + 2 * size.keys();
  float *scores = memory, *out = scores + size.scores() + (kSeen + size.depth * 32) * 16;
  float *tops = out + size.values * 512, *totals = tops + 32;
  bf16* weights = static_cast<bf16*>(static_cast<void*>(scores + size.scores()));
  bf16* q = weights + kSeen * 32;
  const bf16* from = static_cast<const bf16*>(c.q) + first * c.q_row + head * c.q_head;
  for (int64_t i = 0; i < 2 * size.depth; ++i)
    pack_tile(from + i % 2 * 16 * c.q_row + i / 2 * 32, c.q_row, rows - i % 2 * 16, first_words(c.dim - i / 2 * 32),
              q + i * kTile);
  std::fill(out, out + size.values * 512, 0.0f), std::fill(tops, tops + 32, -1e30f),
      std::fill(totals, totals + 32, 0.0f);
  int32_t limits[32] = {};
  for (int64_t i = 0; i < rows; ++i) limits[i] = c.limits[first + i] + int32_t(c.skipped);
  const int64_t end = std::min<int64_t>(c.tokens, *std::max_element(limits, limits + rows));
  const int64_t lowest = *std::min_element(limits, limits + rows), begin = std::max<int64_t>(0, lowest - c.window);
  for (int64_t at = begin / kSeen * kSeen; at < end; at += kSeen) {
    const int64_t tokens = (std::min(kSeen, end - at) + 31) / 32 * 32;
    for (int64_t t = 0; t < tokens; t += 32)
      score_tiles(keys + (at + t) / 16 * size.depth * kTile, q, size.depth, scores + t * 32);
    const bool hides = at + tokens > lowest || at < end - c.window;
    for (int64_t half = 0; half < 32; half += 16) {
      const F factor = softmax_of(c, at, tokens, hides, _mm512_loadu_si512(limits + half), scores + half,
                                  weights + half * 32, tops + half, totals + half);
      if (_mm512_cmpneq_ps_mask(factor, all(1.0f)))
        for (int64_t d = 0; d < size.values * 16; ++d)
          save(out + d * 32 + half, mul(load(out + d * 32 + half), factor));
    }
    for (int64_t d = 0; d < size.values; d += 2)
      value_tiles(values + (at / 32 * size.values + d) * kTile, size.values * kTile, weights, tokens / 32,
                  out + d * 512);
  }
  _tile_release();
  for (int64_t half = 0; half < rows; half += 16) {
    const F total = load(totals + half);
    const __mmask16 seen = _mm512_cmpneq_ps_mask(total, all(0.0f));
    for (int64_t d = 0; d < c.value_dim; d += 16) {
      __m512i x[16];
      alignas(64) float found[16 * 16];
      for (int64_t i = 0; i < 16; ++i)
        x[i] = _mm512_castps_si512(_mm512_maskz_div_ps(seen, load(out + (d + i) * 32 + half), total));
      store_transposed(x, static_cast<bf16*>(static_cast<void*>(found)));
      for (int64_t i = 0; i < std::min<int64_t>(16, rows - half); ++i)
        store_some16(static_cast<bf16*>(c.out) + (first + half + i) * c.out_row + head * c.out_head + d,
                     load(found + i * 16), c.value_dim - d);
    }
  }
  for (int64_t i = 0; c.lse && i < rows; ++i)
    c.lse[(first + i) * c.lse_row + head] =
        totals[i] == 0.0f ? -INFINITY : tops[i] * c.scale + float(std::log(double(totals[i])));
}

inline int64_t prompt_floats(const Prompt& c, bool packed) {
  const PromptSizes size(c);
  return packed ? c.kv_heads * size.both() : size.work();
}
