/* The arithmetic of a stage, over V(f), eight float32 lanes. Included once per instruction set; `LANES` names it, and `TARGET` lets the
   compiler use it.

   What makes a row's bits the same in every batch, chunk, tile, thread, split and instruction set:

   - each output of a product is one chain of fused multiply-adds from +0 in the order of the inner dimension. Lanes run over outputs, so
     their number is of no consequence, and a chain that pauses in memory (between blocks of the inner dimension, or pages of KV) goes on
     where it stopped;
   - stored weights are decoded to the float32 that they stand for, exactly, whatever their form;
   - a sum over a row is eight partial sums, of the elements i, i + 8, i + 16..., added in one fixed order;
   - positions behind a row's own have a weight of exactly 0, and a chain does not change when 0 is added;
   - the exponential is this file's own; division and square root are exact in IEEE arithmetic. */

#define STEP_K 256 /* inner-dimension block that is decoded at a time: 256 × 16 floats fit a first-level cache */
#define TILE_ROWS 6
#define AHEAD 8 /* blocks */
#define QUERY_ROWS 24 /* rows of one attention product */

INLINE float V(sum)(V(f) a) {
    float s[8];
    V(store)(s, a);
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

/* exp(x): 0 below −87, x is taken as 88 above 88. Range reduction by ln 2 in two parts and a Taylor polynomial of degree 7, within 2 ulp. */
INLINE V(f) V(exp)(V(f) x) {
    V(f) t = V(min)(V(max)(x, V(set)(-87.0f)), V(set)(88.0f));
    V(f) n = V(round)(V(mul)(t, V(set)(1.44269504f)));
    V(f) r = V(fma)(n, V(set)(-0.693359375f), t);
    r = V(fma)(n, V(set)(2.12194440e-4f), r);
    V(f) p = V(set)(1.9841270e-4f);
    p = V(fma)(p, r, V(set)(1.3888889e-3f));
    p = V(fma)(p, r, V(set)(8.3333333e-3f));
    p = V(fma)(p, r, V(set)(4.1666667e-2f));
    p = V(fma)(p, r, V(set)(1.6666667e-1f));
    p = V(fma)(p, r, V(set)(0.5f));
    p = V(fma)(p, r, V(set)(1.0f));
    p = V(fma)(p, r, V(set)(1.0f));
    return V(zero_below)(V(mul)(p, V(power_of_two)(n)), x, -87.0f);
}

/* ---- products ---- */

/* c[rows][8 · groups] (+)= a · b[k][8 · groups], with rows · groups accumulators in registers; a[r][i] stands at r · row + i · step.
   `first`: c begins at 0 instead of going on. */
INLINE void V(tile_of)(const int rows, const int groups, int k, const float *a, size_t row, size_t step, const float *b, size_t ldb,
                       float *c, size_t ldc, int first) {
    V(f) acc[TILE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) acc[r][g] = first ? V(set)(0.0f) : V(load)(c + r * ldc + g * 8);
    for (int i = 0; i < k; i++, a += step, b += ldb) {
        V(f) at[4];
        for (int g = 0; g < groups; g++) at[g] = V(load)(b + g * 8);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            V(f) s = V(set)(a[r * row]);
            for (int g = 0; g < groups; g++) acc[r][g] = V(fma)(s, at[g], acc[r][g]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) V(store)(c + r * ldc + g * 8, acc[r][g]);
}

/* The same for any number of rows [rows][k], and `columns`, a multiple of 16. */
TARGET static void V(tiles)(int rows, int columns, int k, const float *a, size_t lda, const float *b, size_t ldb, float *c, size_t ldc,
                            int first) {
    for (; rows > 0; rows -= 6, a += 6 * lda, c += 6 * ldc) {
        int column = 0;
        if (rows <= 3) /* as many chains at a time as with six rows */
            for (; column + 32 <= columns; column += 32) switch (rows) {
                case 3: V(tile_of)(3, 4, k, a, lda, 1, b + column, ldb, c + column, ldc, first); break;
                case 2: V(tile_of)(2, 4, k, a, lda, 1, b + column, ldb, c + column, ldc, first); break;
                default: V(tile_of)(1, 4, k, a, lda, 1, b + column, ldb, c + column, ldc, first); break;
                }
        for (; column < columns; column += 16) switch (rows) {
            case 5: V(tile_of)(5, 2, k, a, lda, 1, b + column, ldb, c + column, ldc, first); break;
            case 4: V(tile_of)(4, 2, k, a, lda, 1, b + column, ldb, c + column, ldc, first); break;
            case 3: V(tile_of)(3, 2, k, a, lda, 1, b + column, ldb, c + column, ldc, first); break;
            case 2: V(tile_of)(2, 2, k, a, lda, 1, b + column, ldb, c + column, ldc, first); break;
            case 1: V(tile_of)(1, 2, k, a, lda, 1, b + column, ldb, c + column, ldc, first); break;
            default: V(tile_of)(6, 2, k, a, lda, 1, b + column, ldb, c + column, ldc, first); break;
            }
    }
}

/* The same for one tile whose rows are interleaved, [k][rows]. */
TARGET static void V(tile)(int rows, int k, const float *a, const float *b, float *c, size_t ldc, int first) {
    switch (rows) {
    case 6: V(tile_of)(6, 2, k, a, 1, 6, b, 16, c, ldc, first); break;
    case 5: V(tile_of)(5, 2, k, a, 1, 5, b, 16, c, ldc, first); break;
    case 4: V(tile_of)(4, 2, k, a, 1, 4, b, 16, c, ldc, first); break;
    case 3: V(tile_of)(3, 2, k, a, 1, 3, b, 16, c, ldc, first); break;
    case 2: V(tile_of)(2, 2, k, a, 1, 2, b, 16, c, ldc, first); break;
    default: V(tile_of)(1, 2, k, a, 1, 1, b, 16, c, ldc, first); break;
    }
}

/* Rows [start, start + count) of the inner dimension of one panel, decoded to out[count][16]. `start` and `count` are whole blocks. */
TARGET static void V(decode)(int kind, const uint8_t *panel, int start, int count, float *out) {
    switch (kind) {
    case KIND_Q4:
        panel += (size_t)start / 32 * Q4_BLOCK;
        for (int block = 0; block < count / 32; block++, panel += Q4_BLOCK) {
            const uint16_t *scales = (const uint16_t *)panel;
            const uint32_t *words = (const uint32_t *)(panel + 64);
            V(f) d0 = V(of_f16)(scales), d1 = V(of_f16)(scales + 8), m0 = V(of_f16)(scales + 16), m1 = V(of_f16)(scales + 24);
            for (int eight = 0; eight < 4; eight++, words += 16) {
                V(u) w0 = V(words)(words), w1 = V(words)(words + 8);
                for (int i = 0; i < 8; i++, out += 16) {
                    V(store)(out, V(fma)(V(low_nibble)(w0), d0, m0));
                    V(store)(out + 8, V(fma)(V(low_nibble)(w1), d1, m1));
                    w0 = V(next_nibble)(w0), w1 = V(next_nibble)(w1);
                }
            }
        }
        break;
    case KIND_Q8:
        panel += (size_t)start / 32 * Q8_BLOCK;
        for (int block = 0; block < count / 32; block++, panel += Q8_BLOCK) {
            V(f) d0 = V(of_f16)((const uint16_t *)panel), d1 = V(of_f16)((const uint16_t *)panel + 8);
            const int8_t *q = (const int8_t *)panel + 32;
            for (int i = 0; i < 32; i++, q += 16, out += 16) {
                V(store)(out, V(mul)(V(of_i8)(q), d0));
                V(store)(out + 8, V(mul)(V(of_i8)(q + 8), d1));
            }
        }
        break;
    case KIND_F16:
    case KIND_BF16: {
        const uint16_t *h = (const uint16_t *)panel + (size_t)start * 16;
        for (int i = 0; i < count * 2; i++, h += 8, out += 8)
            V(store)(out, kind == KIND_F16 ? V(of_f16)(h) : V(of_bf16)(h));
        break;
    }
    default:
        memcpy(out, (const float *)panel + (size_t)start * 16, (size_t)count * 16 * sizeof(float));
    }
}

/* Ask for the cache lines of the block that is AHEAD blocks further on, in one panel or two. */
INLINE void V(fetch)(const uint8_t *panel, const int groups, size_t stride, const int block) {
    for (int g = 0; g < groups; g += 2)
        for (int line = 0; line < block; line += 64) __builtin_prefetch(panel + g / 2 * stride + AHEAD * block + line);
}

/* A few rows times `groups` neighbouring groups of eight outputs (half a panel, a panel, or two), with weights that are decoded in
   registers on their way: what generating runs on. As many chains at a time as there are registers for: `rows` × `groups`. x is one
   interleaved tile, [k][rows]. */
INLINE void V(few_q4)(const int rows, const int groups, int k, const float *x, const uint8_t *panel, size_t stride, int group,
                      float *out, size_t ldo) {
    V(f) acc[8][4], d[4], m[4];
    const size_t skipped = groups == 4 ? stride : 0;
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) acc[r][g] = V(set)(0.0f);
    for (int start = 0; start < k; start += 32, panel += Q4_BLOCK) {
        V(fetch)(panel + (start + 32 * AHEAD < k ? 0 : skipped), groups, stride, Q4_BLOCK);
        for (int g = 0; g < groups; g++) {
            const uint16_t *scales = (const uint16_t *)(panel + (group + g) / 2 * stride) + (group + g) % 2 * 8;
            d[g] = V(of_f16)(scales), m[g] = V(of_f16)(scales + 16);
        }
        for (int eight = 0; eight < 4; eight++) {
            const float *at = x + (size_t)(start + eight * 8) * rows;
            V(u) w[4];
            for (int g = 0; g < groups; g++)
                w[g] = V(words)((const uint32_t *)(panel + (group + g) / 2 * stride + 64) + eight * 16 + (group + g) % 2 * 8);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                for (int g = 0; g < groups; g++) {
                    V(f) weight = V(fma)(V(low_nibble)(w[g]), d[g], m[g]);
                    w[g] = V(next_nibble)(w[g]);
                    for (int r = 0; r < rows; r++) acc[r][g] = V(fma)(V(set)(at[i * rows + r]), weight, acc[r][g]);
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) V(store)(out + r * ldo + (group + g) * 8, acc[r][g]);
}

/* The same for eight-bit weights. */
INLINE void V(few_q8)(const int rows, const int groups, int k, const float *x, const uint8_t *panel, size_t stride, int group,
                      float *out, size_t ldo) {
    V(f) acc[8][4], d[4];
    const size_t skipped = groups == 4 ? stride : 0;
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) acc[r][g] = V(set)(0.0f);
    for (int start = 0; start < k; start += 32, panel += Q8_BLOCK) {
        V(fetch)(panel + (start + 32 * AHEAD < k ? 0 : skipped), groups, stride, Q8_BLOCK);
        for (int g = 0; g < groups; g++)
            d[g] = V(of_f16)((const uint16_t *)(panel + (group + g) / 2 * stride) + (group + g) % 2 * 8);
        const float *at = x + (size_t)start * rows;
#pragma GCC unroll 8
        for (int i = 0; i < 32; i++) {
            for (int g = 0; g < groups; g++) {
                const int8_t *q = (const int8_t *)(panel + (group + g) / 2 * stride) + 32 + i * 16 + (group + g) % 2 * 8;
                V(f) weight = V(mul)(V(of_i8)(q), d[g]);
                for (int r = 0; r < rows; r++) acc[r][g] = V(fma)(V(set)(at[i * rows + r]), weight, acc[r][g]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) V(store)(out + r * ldo + (group + g) * 8, acc[r][g]);
}

/* Functions of their own, so that the compiler gives each all registers. */
#define FEW(form, rows, groups)                                                                                              \
    TARGET static __attribute__((noinline)) void V(form##_##rows##_##groups)(                                                \
        int k, const float *x, const uint8_t *panel, size_t stride, int group, float *out, size_t ldo) {                     \
        V(few_##form)(rows, groups, k, x, panel, stride, group, out, ldo);                                                   \
    }
#define ALL_FEW(form)                                                                                                        \
    FEW(form, 1, 4) FEW(form, 1, 2) FEW(form, 2, 2) FEW(form, 3, 2) FEW(form, 4, 2) FEW(form, 5, 1) FEW(form, 6, 1)          \
    FEW(form, 7, 1) FEW(form, 8, 1)
ALL_FEW(q4)
ALL_FEW(q8)
#undef ALL_FEW
#undef FEW

typedef void V(Few)(int, const float *, const uint8_t *, size_t, int, float *, size_t);

/* `rows` of 1 to 8 times panels [0, count). */
TARGET static void V(few)(int kind, int rows, int k, const float *x, const uint8_t *panel, size_t stride, int count,
                          float *out, size_t ldo) {
    static V(Few) *const q4[] = {V(q4_1_2), V(q4_2_2), V(q4_3_2), V(q4_4_2), V(q4_5_1), V(q4_6_1), V(q4_7_1), V(q4_8_1)};
    static V(Few) *const q8[] = {V(q8_1_2), V(q8_2_2), V(q8_3_2), V(q8_4_2), V(q8_5_1), V(q8_6_1), V(q8_7_1), V(q8_8_1)};
    V(Few) *const few = (kind == KIND_Q4 ? q4 : q8)[rows - 1];
    if (rows == 1)
        for (; count >= 2; count -= 2, panel += 2 * stride, out += 32)
            (kind == KIND_Q4 ? V(q4_1_4) : V(q8_1_4))(k, x, panel, stride, 0, out, ldo);
    for (; count > 0; count--, panel += stride, out += 16) {
        few(k, x, panel, stride, 0, out, ldo);
        if (rows > 4) few(k, x, panel, stride, 1, out, ldo);
    }
}

/* out[rows][16 · panels] = x · panels [first, end) of `w`. x is interleaved in tiles of `tile` rows (`interleave`); `scratch` holds
   STEP_K × 16 floats. */
TARGET static void V(panels)(const Matrix *w, int first, int end, int rows, int tile, const float *x, float *out, size_t ldo,
                             float *scratch) {
    const int k = w->columns;
    const size_t stride = panel_bytes(w->kind, k);
    const uint8_t *panel = (const uint8_t *)w->data + first * stride;
    out += (size_t)first * 16;
    if (decodes_in_registers(w->kind, rows)) {
        V(few)(w->kind, rows, k, x, panel, stride, end - first, out, ldo);
        return;
    }
    for (; first < end; first++, panel += stride, out += 16) {
        for (int start = 0; start < k; start += STEP_K) {
            int count = k - start < STEP_K ? k - start : STEP_K;
            const float *decoded = scratch;
            if (w->kind == KIND_F32) decoded = (const float *)panel + (size_t)start * 16;
            else V(decode)(w->kind, panel, start, count, scratch);
            for (int row = 0; row < rows; row += tile) {
                int height = rows - row < tile ? rows - row : tile;
                V(tile)(height, count, x + (size_t)row * k + (size_t)start * height, decoded, out + row * ldo, ldo, start == 0);
            }
        }
    }
}

/* ---- rows ---- */

/* y = x / √(mean(x²) + eps) · weight; n is a multiple of 8. */
TARGET static void V(rms_norm)(int n, const float *x, const float *weight, float eps, float *y) {
    V(f) squares = V(set)(0.0f);
    for (int i = 0; i < n; i += 8) squares = V(fma)(V(load)(x + i), V(load)(x + i), squares);
    V(f) scale = V(set)(1.0f / sqrtf(V(sum)(squares) / (float)n + eps));
    for (int i = 0; i < n; i += 8) V(store)(y + i, V(mul)(V(mul)(V(load)(x + i), scale), V(load)(weight + i)));
}

/* gate = gate / (1 + exp(−gate)) · up */
TARGET static void V(silu_times)(int n, float *gate, const float *up) {
    for (int i = 0; i < n; i += 8) {
        V(f) g = V(load)(gate + i);
        V(f) e = V(exp)(V(mul)(g, V(set)(-1.0f)));
        V(store)(gate + i, V(mul)(V(div)(g, V(add)(V(set)(1.0f), e)), V(load)(up + i)));
    }
}

TARGET static void V(add_to)(int n, float *x, const float *y) {
    for (int i = 0; i < n; i += 8) V(store)(x + i, V(add)(V(load)(x + i), V(load)(y + i)));
}

/* Rotate one head's halves by the angles of a position (cosines and sines, head_dim / 2 each), and scale. */
TARGET static void V(rotate)(int head_dim, const float *x, const float *cosines, const float *sines, float scale, float *y) {
    int half = head_dim / 2;
    for (int i = 0; i < half; i += 8) {
        V(f) a = V(load)(x + i), b = V(load)(x + half + i), c = V(load)(cosines + i), s = V(load)(sines + i);
        V(store)(y + i, V(mul)(V(fma)(a, c, V(mul)(V(mul)(b, s), V(set)(-1.0f))), V(set)(scale)));
        V(store)(y + half + i, V(mul)(V(fma)(b, c, V(mul)(a, s)), V(set)(scale)));
    }
}

/* Turn scores[0, count) into weights exp(score − largest) and zeros up to `padded` (a multiple of 8); returns the weights' sum. */
TARGET static float V(softmax)(float *scores, int count, int padded) {
    float lanes[8];
    for (int i = count; i < padded; i++) scores[i] = -INFINITY;
    V(f) largest = V(set)(-INFINITY); /* in this order a NaN never counts, however far the row is padded */
    for (int i = 0; i < padded; i += 8) largest = V(max)(V(load)(scores + i), largest);
    V(store)(lanes, largest);
    float most = lanes[0];
    for (int i = 1; i < 8; i++) most = lanes[i] > most ? lanes[i] : most;
    V(f) total = V(set)(0.0f);
    for (int i = 0; i < padded; i += 8) {
        V(f) weight = V(exp)(V(add)(V(load)(scores + i), V(set)(-most)));
        V(store)(scores + i, weight);
        total = V(add)(total, weight);
    }
    return V(sum)(total);
}

/* Attention of consecutive queries of one session under one KV head.

   queries: [num_queries · group][head_dim], rotated and scaled; query i stands at `position + i`.
   pages: where this head's part of each page begins: K [head_dim][64], then V [64][head_dim] at `value_offset`.
   out: row (i, g) goes to out + i · ldo + g · head_dim. `scores` holds QUERY_ROWS × (positions in whole pages). */
TARGET static void V(attend)(int num_queries, int group, int head_dim, int position, const float *queries, const float *const *pages,
                             size_t value_offset, float *scores, float *products, float *out, size_t ldo) {
    const int rows = num_queries * group, last = position + num_queries, num_pages = (last + 63) / 64;
    const size_t width = (size_t)num_pages * 64;
    for (int page = 0; page < num_pages; page++)
        V(tiles)(rows, 64, head_dim, queries, head_dim, pages[page], 64, scores + page * 64, width, 1);
    float inverse[QUERY_ROWS];
    for (int r = 0; r < rows; r++)
        inverse[r] = 1.0f / V(softmax)(scores + r * width, position + r / group + 1, (int)width);
    for (int page = 0; page < num_pages; page++) {
        int count = last - page * 64 < 64 ? last - page * 64 : 64;
        V(tiles)(rows, head_dim, count, scores + page * 64, width, pages[page] + value_offset, head_dim, products, head_dim, page == 0);
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < head_dim; i += 8)
            /* + 0: a chain that stands at −0, because all of it underflowed, may have become +0 by zeros behind its own positions */
            V(store)(out + r / group * ldo + r % group * head_dim + i,
                     V(fma)(V(load)(products + (size_t)r * head_dim + i), V(set)(inverse[r]), V(set)(0.0f)));
}

static const Kernels V(kernels) = {V(panels), V(decode), V(rms_norm), V(silu_times), V(add_to), V(rotate), V(attend)};

#undef LANES
#undef TARGET
