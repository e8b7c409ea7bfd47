/* Eight float32 lanes in plain C: for every other CPU, and what the tests compare the vector instructions with. Where the compiler
   has a fused multiply-add instruction (NEON, for one) it vectorises these loops; else fmaf is exact, and slow. */

#define LANES portable
#define TARGET
#define EACH for (int i = 0; i < 8; i++)

typedef struct { float at[8]; } V(f);
typedef struct { uint32_t at[8]; } V(u);

INLINE float V(bits)(uint32_t bits) { float a; memcpy(&a, &bits, 4); return a; }

INLINE V(f) V(load)(const float *p) { V(f) a; memcpy(a.at, p, sizeof a.at); return a; }
INLINE void V(store)(float *p, V(f) a) { memcpy(p, a.at, sizeof a.at); }
INLINE V(f) V(set)(float s) { V(f) a; EACH a.at[i] = s; return a; }
INLINE V(f) V(add)(V(f) a, V(f) b) { EACH a.at[i] += b.at[i]; return a; }
INLINE V(f) V(mul)(V(f) a, V(f) b) { EACH a.at[i] *= b.at[i]; return a; }
INLINE V(f) V(div)(V(f) a, V(f) b) { EACH a.at[i] /= b.at[i]; return a; }
INLINE V(f) V(max)(V(f) a, V(f) b) { EACH a.at[i] = a.at[i] > b.at[i] ? a.at[i] : b.at[i]; return a; }
INLINE V(f) V(min)(V(f) a, V(f) b) { EACH a.at[i] = a.at[i] < b.at[i] ? a.at[i] : b.at[i]; return a; }
INLINE V(f) V(fma)(V(f) a, V(f) b, V(f) c) { EACH a.at[i] = fmaf(a.at[i], b.at[i], c.at[i]); return a; }
INLINE V(f) V(round)(V(f) a) { EACH a.at[i] = rintf(a.at[i]); return a; }
INLINE V(f) V(power_of_two)(V(f) n) { EACH n.at[i] = V(bits)((uint32_t)((int32_t)n.at[i] + 127) << 23); return n; }
INLINE V(f) V(zero_below)(V(f) a, V(f) x, float bound) { EACH a.at[i] = x.at[i] >= bound ? a.at[i] : 0.0f; return a; }

INLINE V(u) V(words)(const uint32_t *p) { V(u) a; memcpy(a.at, p, sizeof a.at); return a; }
INLINE V(f) V(low_nibble)(V(u) a) { V(f) b; EACH b.at[i] = (float)(a.at[i] & 15); return b; }
INLINE V(u) V(next_nibble)(V(u) a) { EACH a.at[i] >>= 4; return a; }

INLINE V(f) V(of_i8)(const int8_t *p) { V(f) a; EACH a.at[i] = (float)p[i]; return a; }
INLINE V(f) V(of_bf16)(const uint16_t *p) { V(f) a; EACH a.at[i] = V(bits)((uint32_t)p[i] << 16); return a; }

INLINE float V(half)(uint16_t h) {
    uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31) return V(bits)(sign | 0x7F800000 | mantissa << 13);
    if (exponent) return V(bits)(sign | (exponent + 112) << 23 | mantissa << 13);
    float a = (float)mantissa * 0x1p-24f; /* subnormal, or zero: exact */
    return sign ? -a : a;
}
INLINE V(f) V(of_f16)(const uint16_t *p) { V(f) a; EACH a.at[i] = V(half)(p[i]); return a; }

#undef EACH
