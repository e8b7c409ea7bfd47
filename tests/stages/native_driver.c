/* Random stages through the kernels, for the sanitizers: every buffer has exactly the size that kernels.h and kernels.c ask for, so that
   one byte too far is seen. The bits of a random schedule (vectors, threads, pages in any order, pages full of NaN) are compared with
   those of each session alone, in plain C. Usage: driver FIRST_SEED TRIALS. test_native_memory.py builds and runs it. */

#include "kernels.c"

#include <stdio.h>

static uint64_t state;

static uint32_t draw(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 16);
}

static int between(int least, int most) { return least + (int)(draw() % (uint32_t)(most - least + 1)); }

static float number(float most) { return most * ((float)(int32_t)(draw() % 2001) - 1000.0f) / 1000.0f; }

static void *block(size_t bytes) {
    void *p = malloc(bytes);
    if (!p) exit(3);
    return p;
}

static float *numbers(size_t count, float most) {
    float *p = block(count * sizeof *p);
    for (size_t i = 0; i < count; i++) p[i] = number(most);
    return p;
}

enum { MAX_ALLOCATIONS = 1024, SESSIONS = 3, SCALE = 0x2400 /* 2⁻⁶ in float16 */ };
static void *kept[MAX_ALLOCATIONS];
static int num_kept;

static void *keep(void *p) {
    if (num_kept == MAX_ALLOCATIONS) exit(3);
    return kept[num_kept++] = p;
}

static Matrix matrix(int outputs, int columns) {
    static const int kinds[] = {KIND_F32, KIND_F16, KIND_BF16, KIND_Q4, KIND_Q8};
    int kind = kinds[draw() % (columns % 32 ? 3 : 5)];
    size_t row = kind == KIND_Q4 ? columns / 32 * 20 : kind == KIND_Q8 ? columns / 32 * 34 : columns * (kind == KIND_F32 ? 4 : 2);
    uint8_t *raw = block(row * outputs + 1), *rows = raw + 1; /* at an odd address */
    for (size_t i = 0; i < row * outputs; i++) rows[i] = (uint8_t)draw();
    for (size_t i = 0; i < row * outputs;) {
        uint16_t scale = (uint16_t)(SCALE + draw() % 512);
        if (kind == KIND_Q4 || kind == KIND_Q8) {
            memcpy(rows + i, &scale, 2);
            scale |= 0x8000;
            if (kind == KIND_Q4) memcpy(rows + i + 2, &scale, 2);
            i += kind == KIND_Q4 ? 20 : 34;
        } else if (kind == KIND_F32) {
            float f = number(0.2f);
            memcpy(rows + i, &f, 4), i += 4;
        } else {
            scale = (uint16_t)((kind == KIND_F16 ? 0x2800 + draw() % 2048 : 0x3D00 + draw() % 256) | (draw() & 1) << 15);
            memcpy(rows + i, &scale, 2), i += 2;
        }
    }
    uint8_t *packed = keep(block((size_t)tessella_packed_bytes(kind, outputs, columns)));
    tessella_pack(kind, outputs, columns, rows, packed);
    free(raw);
    return (Matrix){kind, outputs, columns, packed};
}

/* Small, or beyond what is decoded at a time. */
static int width_of(void) { return 32 * (draw() % 4 ? between(1, 3) : between(8, 9)); }

static Stage stage_of(int positions) {
    static const int dims[] = {16, 32, 48}, groups[] = {1, 2, 3, 5, 9, 24};
    const int group = groups[draw() % 6];
    Stage s = {.num_layers = between(1, 2), .hidden = width_of(), .head_dim = dims[draw() % 3], .kv_heads = between(1, 2),
               .ffn = width_of(), .eps = 1e-5f};
    if (group > 3) s.kv_heads = 1, s.head_dim = 16;
    s.heads = s.kv_heads * group;
    const int width = s.heads * s.head_dim, kv_width = s.kv_heads * s.head_dim, vocabulary = between(1, 70);
    Layer *layers = keep(block(s.num_layers * sizeof *layers));
    for (int i = 0; i < s.num_layers; i++)
        layers[i] = (Layer){keep(numbers(s.hidden, 1.0f)), keep(numbers(s.hidden, 1.0f)), matrix(width, s.hidden), matrix(kv_width, s.hidden),
                            matrix(kv_width, s.hidden), matrix(s.hidden, width), matrix(s.ffn, s.hidden), matrix(s.ffn, s.hidden),
                            matrix(s.hidden, s.ffn)};
    s.layers = layers;
    s.cosines = keep(numbers((size_t)positions * s.head_dim / 2, 1.0f)), s.sines = keep(numbers((size_t)positions * s.head_dim / 2, 1.0f));
    s.embedding = matrix(vocabulary, s.hidden), s.output_norm = keep(numbers(s.hidden, 1.0f)), s.output = matrix(vocabulary, s.hidden);
    return s;
}

static size_t page_floats(const Stage *s) { return (size_t)s->num_layers * s->kv_heads * 2 * s->head_dim * PAGE; }

static float *arena_of(const Stage *s, int pages) {
    float *kv = block(pages * page_floats(s) * sizeof *kv);
    for (size_t i = 0; i < pages * page_floats(s); i++) kv[i] = NAN;
    return kv;
}

static void check(int holds, const char *what, uint64_t seed) {
    if (holds) return;
    fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed, what);
    exit(1);
}

static void trial(uint64_t seed) {
    state = seed * 0x9E3779B97F4A7C15u + 1;
    for (int i = 0; i < 8; i++) draw();
    num_kept = 0;
    const int positions = draw() % 2 ? between(1, 20) : between(60, 100), pages = (positions + PAGE - 1) / PAGE;
    const Stage s = stage_of(positions);
    const size_t hidden = s.hidden, padded = (size_t)(s.output.outputs + PANEL - 1) / PANEL * PANEL;
    int lengths[SESSIONS];
    uint32_t *ids[SESSIONS];
    float *rows[SESSIONS], *logits[SESSIONS];

    /* each session alone, in plain C, at once as far as the engine has rows */
    int most = between(1, 70);
    Engine *plain = tessella_new(&s, 1, most, positions, 1);
    check(plain != NULL, "no engine", seed);
    for (int i = 0; i < SESSIONS; i++) {
        lengths[i] = between(1, positions);
        ids[i] = block(lengths[i] * sizeof *ids[i]), rows[i] = block(lengths[i] * hidden * sizeof(float));
        logits[i] = block(lengths[i] * padded * sizeof(float));
        for (int p = 0; p < lengths[i]; p++) ids[i][p] = draw() % (uint32_t)s.embedding.outputs;
        int32_t *table = block(pages * sizeof *table);
        for (int p = 0; p < pages; p++) table[p] = pages - 1 - p;
        float *kv = arena_of(&s, pages);
        tessella_embed(plain, ids[i], lengths[i], rows[i]);
        for (int done = 0; done < lengths[i];) {
            Segment segment = {done, lengths[i] - done < most ? lengths[i] - done : most, table};
            check(tessella_forward(plain, rows[i] + done * hidden, &segment, 1, kv) == 0, "no memory", seed);
            tessella_logits(plain, rows[i] + done * hidden, segment.rows, logits[i] + done * padded);
            done += segment.rows;
        }
        free(kv), free(table);
    }
    tessella_free(plain);

    /* all together, in any order */
    int max_rows = between(SESSIONS, 70), done[SESSIONS] = {0}, left = 0;
    Engine *engine = tessella_new(&s, between(1, 3), max_rows, positions, (int)(draw() % 8 == 0));
    check(engine != NULL, "no engine", seed);
    float *kv = arena_of(&s, SESSIONS * pages);
    int32_t *tables[SESSIONS], order[SESSIONS * 4];
    for (int i = 0; i < SESSIONS * pages; i++) order[i] = i;
    for (int i = SESSIONS * pages - 1; i > 0; i--) {
        int other = between(0, i), page = order[i];
        order[i] = order[other], order[other] = page;
    }
    for (int i = 0; i < SESSIONS; i++) {
        tables[i] = block(pages * sizeof **tables);
        memcpy(tables[i], order + i * pages, pages * sizeof **tables);
        left += lengths[i];
    }
    while (left) {
        Segment segments[SESSIONS];
        int who[SESSIONS], num = 0, total = 0;
        for (int i = 0, first = between(0, SESSIONS - 1); i < SESSIONS; i++) {
            int session = (first + i) % SESSIONS, most_rows = max_rows - total;
            if (lengths[session] - done[session] < most_rows) most_rows = lengths[session] - done[session];
            if (most_rows < 1 || (num && draw() % 3 == 0)) continue;
            int count = draw() % 3 ? between(1, most_rows) : 1;
            who[num] = session, segments[num++] = (Segment){done[session], count, tables[session]}, total += count;
        }
        float *x = block(total * hidden * sizeof *x), *out = block(total * padded * sizeof *out);
        for (int i = 0, row = 0; i < num; row += segments[i++].rows)
            tessella_embed(engine, ids[who[i]] + done[who[i]], segments[i].rows, x + row * hidden);
        Segment *exact = block(num * sizeof *exact);
        memcpy(exact, segments, num * sizeof *exact);
        check(tessella_forward(engine, x, exact, num, kv) == 0, "no memory", seed);
        tessella_logits(engine, x, total, out);
        for (int i = 0, row = 0; i < num; row += segments[i++].rows) {
            int session = who[i];
            check(!memcmp(x + row * hidden, rows[session] + done[session] * hidden, segments[i].rows * hidden * sizeof *x), "other rows", seed);
            check(!memcmp(out + row * padded, logits[session] + done[session] * padded, segments[i].rows * padded * sizeof *x),
                  "other logits", seed);
            for (size_t at = 0; at < segments[i].rows * hidden; at++) check(isfinite(x[row * hidden + at]), "not finite", seed);
            done[session] += segments[i].rows, left -= segments[i].rows;
        }
        free(x), free(out), free(exact);
    }
    tessella_free(engine);
    free(kv);
    for (int i = 0; i < SESSIONS; i++) free(ids[i]), free(rows[i]), free(logits[i]), free(tables[i]);
    while (num_kept) free(kept[--num_kept]);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const uint64_t first = strtoull(argv[1], NULL, 10), trials = strtoull(argv[2], NULL, 10);
    for (uint64_t seed = first; seed < first + trials; seed++) trial(seed);
    tessella_free(NULL);
    printf("%llu trials, %s\n", (unsigned long long)trials, tessella_instructions(0));
    return 0;
}
