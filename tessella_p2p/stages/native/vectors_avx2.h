/* Eight float32 lanes on x86-64 with AVX2, FMA and F16C. See kernels.h for what the names mean. */

#define LANES avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))

typedef __m256 V(f);
typedef __m256i V(u);

INLINE V(f) V(load)(const float *p) { return _mm256_loadu_ps(p); }
INLINE void V(store)(float *p, V(f) a) { _mm256_storeu_ps(p, a); }
INLINE V(f) V(set)(float a) { return _mm256_set1_ps(a); }
INLINE V(f) V(add)(V(f) a, V(f) b) { return _mm256_add_ps(a, b); }
INLINE V(f) V(mul)(V(f) a, V(f) b) { return _mm256_mul_ps(a, b); }
INLINE V(f) V(div)(V(f) a, V(f) b) { return _mm256_div_ps(a, b); }
INLINE V(f) V(max)(V(f) a, V(f) b) { return _mm256_max_ps(a, b); }
INLINE V(f) V(min)(V(f) a, V(f) b) { return _mm256_min_ps(a, b); }
INLINE V(f) V(fma)(V(f) a, V(f) b, V(f) c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V(f) V(round)(V(f) a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE V(f) V(power_of_two)(V(f) n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

INLINE V(f) V(zero_below)(V(f) a, V(f) x, float bound) {
    return _mm256_and_ps(a, _mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_GE_OQ));
}

INLINE V(u) V(words)(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE V(f) V(low_nibble)(V(u) a) { return _mm256_cvtepi32_ps(_mm256_and_si256(a, _mm256_set1_epi32(15))); }
INLINE V(u) V(next_nibble)(V(u) a) { return _mm256_srli_epi32(a, 4); }

INLINE V(f) V(of_i8)(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
INLINE V(f) V(of_f16)(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE V(f) V(of_bf16)(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
