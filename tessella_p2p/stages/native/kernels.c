/* A stage of a llama model in float32, bit for bit the same on every CPU. kernels.h has the arithmetic; here are the shapes: packing,
   the layers, the threads. No global state, no I/O. What Python checked (engine.py) is not checked again: shapes, positions, pages. */

#include <fenv.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- what Python hands over (binding.py mirrors these) ---- */

enum { KIND_F32 = 0, KIND_F16 = 1, KIND_BF16 = 2, KIND_Q4 = 3, KIND_Q8 = 4 };
enum { PANEL = 16, PAGE = 64, Q4_BLOCK = 320, Q8_BLOCK = 544 };

/* A matrix in panels of 16 outputs; the last panel is filled up with zeros. Inside a panel, for each index of the inner dimension:

   F32, F16, BF16   16 numbers
   Q8   per block of 32: 16 float16 scales d, then 32 × 16 int8 q: the number is q · d
   Q4   per block of 32: 16 float16 scales d, 16 float16 offsets m, then 4 × 16 words of 8 nibbles q, lowest first: q · d + m */
typedef struct {
    int32_t kind, outputs, columns;
    const void *data;
} Matrix;

typedef struct {
    const float *attention_norm, *ffn_norm;
    Matrix q, k, v, attention_output, gate, up, down;
} Layer;

typedef struct {
    int32_t num_layers, hidden, heads, kv_heads, head_dim, ffn;
    float eps;
    const Layer *layers;
    const float *cosines, *sines; /* [positions][head_dim / 2] */
    Matrix embedding;             /* of a head */
    const float *output_norm;     /* of a tail */
    Matrix output;
} Stage;

/* Consecutive rows of one session; `pages` are indices into the KV, one for every 64 positions up to the last row's. */
typedef struct {
    int32_t position, rows;
    const int32_t *pages;
} Segment;

/* ---- one set of kernels for each instruction set ---- */

typedef struct {
    void (*panels)(const Matrix *, int, int, int, int, const float *, float *, size_t, float *);
    void (*decode)(int, const uint8_t *, int, int, float *);
    void (*rms_norm)(int, const float *, const float *, float, float *);
    void (*silu_times)(int, float *, const float *);
    void (*add_to)(int, float *, const float *);
    void (*rotate)(int, const float *, const float *, const float *, float, float *);
    void (*attend)(int, int, int, int, const float *, const float *const *, size_t, float *, float *, float *, size_t);
} Kernels;

static size_t panel_bytes(int kind, int columns) {
    switch (kind) {
    case KIND_Q4: return (size_t)columns / 32 * Q4_BLOCK;
    case KIND_Q8: return (size_t)columns / 32 * Q8_BLOCK;
    case KIND_F32: return (size_t)columns * PANEL * 4;
    default: return (size_t)columns * PANEL * 2;
    }
}

/* Whether a product of so many rows decodes its weights in registers: with more rows than accumulators it pays to decode a weight once,
   into memory. And how many rows it has in one tile. */
static int decodes_in_registers(int kind, int rows) { return (kind == KIND_Q4 || kind == KIND_Q8) && rows <= 8; }

static int tile_rows(int kind, int rows) { return decodes_in_registers(kind, rows) ? rows : 6; }

/* x [rows][k], as tiles of [k][tile] one after another; the last may be lower. */
static void interleave(int rows, int tile, int k, const float *x, size_t ldx, float *out) {
    for (int row = 0; row < rows; row += tile) {
        int height = rows - row < tile ? rows - row : tile;
        for (int r = 0; r < height; r++)
            for (int i = 0; i < k; i++) out[(size_t)row * k + (size_t)i * height + r] = x[(row + r) * ldx + i];
    }
}

#define INLINE TARGET static inline __attribute__((always_inline, unused))
#define PASTE_(a, b) v_##b##_##a
#define PASTE(a, b) PASTE_(a, b)
#define V(name) PASTE(LANES, name)

#include "vectors_portable.h"
#include "kernels.h"
#if defined(__x86_64__)
#include "vectors_avx2.h"
#include "kernels.h"
#endif

static const Kernels *kernels_named(int portable) {
#if defined(__x86_64__)
    if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return &v_kernels_avx2;
#endif
    (void)portable;
    return &v_kernels_portable;
}

/* ---- packing ---- */

int64_t tessella_packed_bytes(int32_t kind, int32_t outputs, int32_t columns) {
    return (int64_t)panel_bytes(kind, columns) * ((outputs + PANEL - 1) / PANEL);
}

/* From rows of GGUF blocks (Q4_1, Q8_0) or plain numbers. */
void tessella_pack(int32_t kind, int32_t outputs, int32_t columns, const uint8_t *rows, uint8_t *packed) {
    const size_t stride = panel_bytes(kind, columns), size = kind == KIND_F32 ? 4 : 2;
    memset(packed, 0, (size_t)tessella_packed_bytes(kind, outputs, columns));
    for (int output = 0; output < outputs; output++) {
        uint8_t *panel = packed + output / PANEL * stride;
        const int lane = output % PANEL;
        if (kind == KIND_Q4) {
            for (int block = 0; block < columns / 32; block++, rows += 20, panel += Q4_BLOCK) {
                memcpy(panel + 2 * lane, rows, 2);
                memcpy(panel + 32 + 2 * lane, rows + 2, 2);
                for (int eight = 0; eight < 4; eight++) {
                    uint32_t word = 0;
                    for (int i = 0; i < 8; i++) {
                        uint8_t pair = rows[4 + (eight * 8 + i) % 16];
                        word |= (uint32_t)(eight < 2 ? pair & 15 : pair >> 4) << (4 * i);
                    }
                    memcpy(panel + 64 + (eight * 16 + lane) * 4, &word, 4);
                }
            }
        } else if (kind == KIND_Q8) {
            for (int block = 0; block < columns / 32; block++, rows += 34, panel += Q8_BLOCK) {
                memcpy(panel + 2 * lane, rows, 2);
                for (int i = 0; i < 32; i++) panel[32 + i * 16 + lane] = rows[2 + i];
            }
        } else {
            for (int i = 0; i < columns; i++, rows += size) memcpy(panel + ((size_t)i * PANEL + lane) * size, rows, size);
        }
    }
}

/* ---- threads ---- */

typedef void (*Job)(void *context, int unit, int thread);

typedef struct {
    pthread_t thread;
    struct Engine *engine;
    int index;
} Helper;

typedef struct {
    float *decoded, *scores, *products, *queries;
    const float **pages;
} Scratch;

typedef struct {
    int segment, query, num_queries, kv_head, row;
} Unit;

typedef struct Engine {
    Stage stage;
    const Kernels *kernels;
    int threads, num_units;
    Scratch *scratch;
    float *norm, *q, *k, *v, *mixed, *gate, *up, *added, *tiles;
    Unit *units;
    /* what the forward that runs works on */
    const Segment *segments;
    int32_t *row_segments;
    float *x, *kv;
    const Layer *layer;
    int layer_index;
    /* the pool */
    Helper *helpers;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    atomic_int generation, next, busy;
    int stopping, num_jobs;
    Job job;
    void *context;
} Engine;

/* Another library may have set its threads to flush subnormal numbers, or to round otherwise, and a new thread inherits that: it must
   not show in the bits. */
static void standard_arithmetic(fenv_t *before) {
    fegetenv(before);
    fesetenv(FE_DFL_ENV);
}

static void work(Engine *engine, int thread) {
    for (int unit; (unit = atomic_fetch_add(&engine->next, 1)) < engine->num_jobs;) engine->job(engine->context, unit, thread);
}

static void *helper_main(void *argument) {
    Helper *helper = argument;
    Engine *engine = helper->engine;
    int seen = 0;
    fenv_t inherited;
    standard_arithmetic(&inherited);
    for (;;) {
        for (int i = 0; i < 4000 && atomic_load(&engine->generation) == seen; i++) {
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
        pthread_mutex_lock(&engine->lock);
        while (atomic_load(&engine->generation) == seen) pthread_cond_wait(&engine->wake, &engine->lock);
        seen = atomic_load(&engine->generation);
        int stopping = engine->stopping;
        pthread_mutex_unlock(&engine->lock);
        if (stopping) return NULL;
        work(engine, helper->index);
        atomic_fetch_sub(&engine->busy, 1);
    }
}

/* Run `job` for each unit in [0, units); units of one job may run at the same time, and touch different outputs. */
static void for_each(Engine *engine, Job job, void *context, int units) {
    if (engine->threads == 1 || units < 2) {
        for (int unit = 0; unit < units; unit++) job(context, unit, 0);
        return;
    }
    pthread_mutex_lock(&engine->lock);
    engine->job = job, engine->context = context, engine->num_jobs = units;
    atomic_store(&engine->next, 0);
    atomic_store(&engine->busy, engine->threads - 1);
    atomic_fetch_add(&engine->generation, 1);
    pthread_cond_broadcast(&engine->wake);
    pthread_mutex_unlock(&engine->lock);
    work(engine, 0);
    while (atomic_load(&engine->busy)) {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
}

/* ---- products ---- */

typedef struct {
    Engine *engine;
    const Matrix *matrix;
    const float *x;
    float *out;
    size_t ldo;
    int rows, tile, panels, parts;
} Product;

static void product_part(void *context, int unit, int thread) {
    const Product *p = context;
    int first = (int)((int64_t)p->panels * unit / p->parts), end = (int)((int64_t)p->panels * (unit + 1) / p->parts);
    p->engine->kernels->panels(p->matrix, first, end, p->rows, p->tile, p->x, p->out, p->ldo, p->engine->scratch[thread].decoded);
}

typedef struct {
    const Matrix *matrix;
    float *out;
    size_t ldo;
} Output;

/* For each output, out = x [rows][columns] · matrixᵀ; the matrices have the same columns. */
static void multiply(Engine *engine, int rows, const float *x, int count, const Output *outputs) {
    int interleaved = 0;
    for (const Output *output = outputs; output < outputs + count; output++) {
        const Matrix *matrix = output->matrix;
        const int tile = tile_rows(matrix->kind, rows), panels = (matrix->outputs + PANEL - 1) / PANEL;
        const int parts = engine->threads == 1 ? 1 : panels < 4 * engine->threads ? panels : 4 * engine->threads;
        if (rows > 1 && tile != interleaved) {
            interleave(rows, tile, matrix->columns, x, (size_t)matrix->columns, engine->tiles);
            interleaved = tile;
        }
        Product product = {engine, matrix, rows > 1 ? engine->tiles : x, output->out, output->ldo, rows, tile, panels, parts};
        for_each(engine, product_part, &product, parts);
    }
}

/* ---- layers ---- */

static float *head_pages(const Engine *engine, int page, int kv_head) {
    const Stage *s = &engine->stage;
    size_t head = (size_t)2 * s->head_dim * PAGE;
    return engine->kv + ((size_t)page * s->num_layers + engine->layer_index) * s->kv_heads * head + kv_head * head;
}

static void norm_row(Engine *engine, const float *weight, int row) {
    const Stage *s = &engine->stage;
    engine->kernels->rms_norm(s->hidden, engine->x + (size_t)row * s->hidden, weight, s->eps, engine->norm + (size_t)row * s->hidden);
}

static void attention_norm(void *context, int row, int thread) {
    Engine *engine = context;
    (void)thread;
    norm_row(engine, engine->layer->attention_norm, row);
}

static void ffn_norm(void *context, int row, int thread) {
    Engine *engine = context;
    const Stage *s = &engine->stage;
    (void)thread;
    engine->kernels->add_to(s->hidden, engine->x + (size_t)row * s->hidden, engine->added + (size_t)row * s->hidden);
    norm_row(engine, engine->layer->ffn_norm, row);
}

static void add_ffn(void *context, int row, int thread) {
    Engine *engine = context;
    const Stage *s = &engine->stage;
    (void)thread;
    engine->kernels->add_to(s->hidden, engine->x + (size_t)row * s->hidden, engine->added + (size_t)row * s->hidden);
}

static void activate(void *context, int row, int thread) {
    Engine *engine = context;
    (void)thread;
    engine->kernels->silu_times(engine->stage.ffn, engine->gate + (size_t)row * engine->stage.ffn,
                                engine->up + (size_t)row * engine->stage.ffn);
}

/* Put one row's keys, rotated, and its values where they belong. */
static void keep_row(void *context, int row, int thread) {
    Engine *engine = context;
    const Stage *s = &engine->stage;
    const Segment *segment = &engine->segments[engine->row_segments[2 * row]];
    const int position = segment->position + engine->row_segments[2 * row + 1], slot = position % PAGE, half = s->head_dim / 2;
    float *rotated = engine->scratch[thread].queries;
    for (int head = 0; head < s->kv_heads; head++) {
        size_t at = (size_t)row * s->kv_heads * s->head_dim + (size_t)head * s->head_dim;
        float *keys = head_pages(engine, segment->pages[position / PAGE], head), *values = keys + (size_t)s->head_dim * PAGE;
        engine->kernels->rotate(s->head_dim, engine->k + at, s->cosines + (size_t)position * half, s->sines + (size_t)position * half,
                                1.0f, rotated);
        for (int i = 0; i < s->head_dim; i++) keys[(size_t)i * PAGE + slot] = rotated[i];
        memcpy(values + (size_t)slot * s->head_dim, engine->v + at, (size_t)s->head_dim * sizeof(float));
    }
}

static void attend_unit(void *context, int index, int thread) {
    Engine *engine = context;
    const Stage *s = &engine->stage;
    const Unit *unit = &engine->units[index];
    const Segment *segment = &engine->segments[unit->segment];
    Scratch *scratch = &engine->scratch[thread];
    const int group = s->heads / s->kv_heads, half = s->head_dim / 2, width = s->heads * s->head_dim;
    const int position = segment->position + unit->query, num_pages = (position + unit->num_queries + PAGE - 1) / PAGE;
    const float scale = 1.0f / sqrtf((float)s->head_dim);
    for (int page = 0; page < num_pages; page++) scratch->pages[page] = head_pages(engine, segment->pages[page], unit->kv_head);
    const size_t offset = (size_t)unit->row * width + (size_t)unit->kv_head * group * s->head_dim;
    for (int i = 0; i < unit->num_queries; i++)
        for (int g = 0; g < group; g++)
            engine->kernels->rotate(s->head_dim, engine->q + offset + (size_t)i * width + (size_t)g * s->head_dim,
                                    s->cosines + (size_t)(position + i) * half, s->sines + (size_t)(position + i) * half, scale,
                                    scratch->queries + (size_t)(i * group + g) * s->head_dim);
    engine->kernels->attend(unit->num_queries, group, s->head_dim, position, scratch->queries, scratch->pages,
                            (size_t)s->head_dim * PAGE, scratch->scores, scratch->products, engine->mixed + offset, (size_t)width);
}

/* Which queries are attended together, under each KV head; and whose each row is. Returns 0 if there is no memory. */
static int place(Engine *engine, int num_segments) {
    const Stage *s = &engine->stage;
    const int at_once = QUERY_ROWS / (s->heads / s->kv_heads);
    int count = 0, row = 0;
    for (int i = 0; i < num_segments; i++) count += (engine->segments[i].rows + at_once - 1) / at_once * s->kv_heads;
    if (count > engine->num_units) {
        Unit *units = realloc(engine->units, (size_t)count * sizeof *units);
        if (!units) return 0;
        engine->units = units, engine->num_units = count;
    }
    count = 0;
    for (int i = 0; i < num_segments; i++) {
        const int rows = engine->segments[i].rows;
        for (int query = 0; query < rows; query += at_once)
            for (int head = 0; head < s->kv_heads; head++)
                engine->units[count++] = (Unit){i, query, rows - query < at_once ? rows - query : at_once, head, row + query};
        for (int r = 0; r < rows; r++, row++) engine->row_segments[2 * row] = i, engine->row_segments[2 * row + 1] = r;
    }
    return count;
}

/* All layers over x [rows][hidden], in place; the segments' rows follow one another. `kv` is the arena of pages
   [pages][layers][kv_heads][K: head_dim × 64, V: 64 × head_dim]. rows is at most max_rows. Returns 0, or −1 without memory. */
int32_t tessella_forward(Engine *engine, float *x, const Segment *segments, int32_t num_segments, float *kv) {
    const Stage *s = &engine->stage;
    const size_t hidden = (size_t)s->hidden, width = (size_t)s->heads * s->head_dim, kv_width = (size_t)s->kv_heads * s->head_dim;
    engine->x = x, engine->segments = segments, engine->kv = kv;
    int rows = 0, units = place(engine, num_segments);
    if (!units) return -1;
    for (int i = 0; i < num_segments; i++) rows += segments[i].rows;
    fenv_t before;
    standard_arithmetic(&before);
    for (int layer = 0; layer < s->num_layers; layer++) {
        const Layer *w = engine->layer = &s->layers[layer];
        engine->layer_index = layer;
        for_each(engine, attention_norm, engine, rows);
        const Output qkv[] = {{&w->q, engine->q, width}, {&w->k, engine->k, kv_width}, {&w->v, engine->v, kv_width}};
        multiply(engine, rows, engine->norm, 3, qkv);
        for_each(engine, keep_row, engine, rows);
        for_each(engine, attend_unit, engine, units);
        multiply(engine, rows, engine->mixed, 1, &(Output){&w->attention_output, engine->added, hidden});
        for_each(engine, ffn_norm, engine, rows);
        const Output gated[] = {{&w->gate, engine->gate, (size_t)s->ffn}, {&w->up, engine->up, (size_t)s->ffn}};
        multiply(engine, rows, engine->norm, 2, gated);
        for_each(engine, activate, engine, rows);
        multiply(engine, rows, engine->gate, 1, &(Output){&w->down, engine->added, hidden});
        for_each(engine, add_ffn, engine, rows);
    }
    fesetenv(&before);
    return 0;
}

static void output_norm(const Engine *engine, const float *hidden, int rows, float *out) {
    const Stage *s = &engine->stage;
    for (size_t row = 0; row < (size_t)rows; row++)
        engine->kernels->rms_norm(s->hidden, hidden + row * s->hidden, s->output_norm, s->eps, out + row * s->hidden);
}

/* out[rows][hidden]: hidden states [rows][hidden] behind the last norm, of a tail; any number of rows. */
void tessella_normed(Engine *engine, const float *hidden, int32_t rows, float *out) {
    fenv_t before;
    standard_arithmetic(&before);
    output_norm(engine, hidden, rows, out);
    fesetenv(&before);
}

/* logits[rows][outputs up to a multiple of 16] of hidden states [rows][hidden]; rows is at most max_rows. */
void tessella_logits(Engine *engine, const float *hidden, int32_t rows, float *logits) {
    const Stage *s = &engine->stage;
    fenv_t before;
    standard_arithmetic(&before);
    output_norm(engine, hidden, rows, engine->norm);
    const size_t width = ((size_t)s->output.outputs + PANEL - 1) / PANEL * PANEL;
    multiply(engine, rows, engine->norm, 1, &(Output){&s->output, logits, width});
    fesetenv(&before);
}

/* out[rows][hidden]: the embeddings of token ids, which are inside of the vocabulary. */
void tessella_embed(Engine *engine, const uint32_t *ids, int32_t rows, float *out) {
    const Matrix *m = &engine->stage.embedding;
    float *decoded = engine->scratch[0].decoded;
    fenv_t before;
    standard_arithmetic(&before);
    for (int row = 0; row < rows; row++, out += m->columns) {
        const uint8_t *panel = (const uint8_t *)m->data + ids[row] / PANEL * panel_bytes(m->kind, m->columns);
        for (int start = 0; start < m->columns; start += STEP_K) {
            int count = m->columns - start < STEP_K ? m->columns - start : STEP_K;
            engine->kernels->decode(m->kind, panel, start, count, decoded);
            for (int i = 0; i < count; i++) out[start + i] = decoded[(size_t)i * PANEL + ids[row] % PANEL];
        }
    }
    fesetenv(&before);
}

/* ---- life ---- */

void tessella_free(Engine *engine) {
    if (!engine) return;
    if (engine->helpers) {
        pthread_mutex_lock(&engine->lock);
        engine->stopping = 1;
        atomic_fetch_add(&engine->generation, 1);
        pthread_cond_broadcast(&engine->wake);
        pthread_mutex_unlock(&engine->lock);
        for (int i = 1; i < engine->threads; i++)
            if (engine->helpers[i].engine) pthread_join(engine->helpers[i].thread, NULL);
    }
    for (int i = 0; engine->scratch && i < engine->threads; i++) {
        free(engine->scratch[i].decoded), free(engine->scratch[i].scores), free(engine->scratch[i].products);
        free(engine->scratch[i].queries), free(engine->scratch[i].pages);
    }
    free(engine->scratch), free(engine->norm), free(engine->q), free(engine->k), free(engine->v), free(engine->mixed);
    free(engine->gate), free(engine->up), free(engine->added), free(engine->tiles), free(engine->units), free(engine->row_segments), free(engine->helpers);
    pthread_mutex_destroy(&engine->lock), pthread_cond_destroy(&engine->wake);
    free(engine);
}

static float *floats(size_t count) { return malloc(count * sizeof(float)); }

/* An engine of its own buffers and threads over `stage`, whose arrays have to outlive it. NULL without memory or threads. */
Engine *tessella_new(const Stage *stage, int32_t threads, int32_t max_rows, int32_t max_positions, int32_t portable) {
    Engine *engine = calloc(1, sizeof *engine);
    if (!engine) return NULL;
    const size_t rows = (size_t)max_rows, pages = ((size_t)max_positions + PAGE - 1) / PAGE, head_dim = (size_t)stage->head_dim;
    const size_t width = stage->heads * head_dim, kv_width = stage->kv_heads * head_dim;
    engine->stage = *stage, engine->kernels = kernels_named(portable), engine->threads = threads;
    pthread_mutex_init(&engine->lock, NULL), pthread_cond_init(&engine->wake, NULL);
    engine->scratch = calloc((size_t)threads, sizeof *engine->scratch);
    engine->norm = floats(rows * stage->hidden), engine->added = floats(rows * stage->hidden);
    engine->q = floats(rows * width), engine->mixed = floats(rows * width);
    engine->k = floats(rows * kv_width), engine->v = floats(rows * kv_width);
    engine->gate = floats(rows * stage->ffn), engine->up = floats(rows * stage->ffn);
    size_t widest = (size_t)(stage->ffn > stage->hidden ? stage->ffn : stage->hidden);
    if (width > widest) widest = width; /* heads need not add up to the hidden size */
    engine->tiles = floats(rows * widest);
    engine->row_segments = malloc(rows * 2 * sizeof(int32_t));
    int ok = engine->scratch && engine->norm && engine->added && engine->q && engine->mixed && engine->k && engine->v &&
             engine->gate && engine->up && engine->tiles && engine->row_segments;
    for (int i = 0; ok && i < threads; i++) {
        Scratch *scratch = &engine->scratch[i];
        scratch->decoded = floats((size_t)STEP_K * PANEL);
        scratch->scores = floats(QUERY_ROWS * pages * PAGE);
        scratch->products = floats(QUERY_ROWS * head_dim), scratch->queries = floats(QUERY_ROWS * head_dim);
        scratch->pages = malloc(pages * sizeof *scratch->pages);
        ok = scratch->decoded && scratch->scores && scratch->products && scratch->queries && scratch->pages;
    }
    if (ok && threads > 1) {
        /* Signals are for the threads that were there before. What a thread does to itself stays its own. */
        sigset_t blocked, before;
        sigfillset(&blocked);
        sigdelset(&blocked, SIGSEGV), sigdelset(&blocked, SIGBUS), sigdelset(&blocked, SIGILL), sigdelset(&blocked, SIGFPE);
        pthread_sigmask(SIG_BLOCK, &blocked, &before);
        ok = (engine->helpers = calloc((size_t)threads, sizeof *engine->helpers)) != NULL;
        for (int i = 1; ok && i < threads; i++) {
            engine->helpers[i] = (Helper){.engine = engine, .index = i};
            if (pthread_create(&engine->helpers[i].thread, NULL, helper_main, &engine->helpers[i])) engine->helpers[i].engine = NULL, ok = 0;
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    if (!ok) { tessella_free(engine); return NULL; }
    return engine;
}

/* The instruction set that an engine uses. */
const char *tessella_instructions(int32_t portable) {
    return kernels_named(portable) == &v_kernels_portable ? "portable" : "avx2";
}
