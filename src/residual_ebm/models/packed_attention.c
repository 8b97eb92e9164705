/* Attention within whole rows, causal or both ways, and of one new token a row to a prefix that rows
   share and to each row's own tokens, in bfloat16 with sums in float32, for processors that multiply
   pairs of bfloat16 (AVX-512 BF16).

   Shapes: N rows, G prefixes, K heads of keys and values, R queries of each, D numbers a head, P
   tokens of a prefix, S own tokens of a row, the newest among them, L tokens of a whole row.
   Numbers are packed in pairs, one pair to 32 bits: keys (D / 2, tokens), so that a row of memory
   holds 16 tokens or more, values (tokens / 2, D). Tokens are padded to a multiple of 16. */

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define PADDED(tokens) (((tokens) + LANES - 1) / LANES * LANES)
#define NEVER -3e38f /* next to the least there is: a score whose exponential is next to nothing */

typedef uint16_t number; /* a bfloat16 */
typedef uint32_t pair;

/* Rows of pairs: some heads that lie `head` apart, then the same `row` further. */
typedef struct {
    const pair *first;
    int64_t heads, head, row;
} rows_of_pairs;

INLINE const pair *row_of(rows_of_pairs rows, int64_t index) {
    return rows.first + index / rows.heads * rows.row + index % rows.heads * rows.head;
}

/* As many sums as there are registers for, beside those for a column's pairs and a row's. */
#define SUMS 24
#define ROWS_AT_ONCE 12

INLINE __m512bh pairs_of(const pair *place) { return (__m512bh)_mm512_loadu_si512(place); }

/* A few rows times a few vectors of columns. */
INLINE void multiply_tile(const int count, const int vectors, const pair *const *left,
                          int64_t pairs, const pair *right, int64_t right_row, float *out,
                          int64_t out_row, int add) {
    __m512 sum[SUMS];
    for (int i = 0; i < count; i++)
        for (int j = 0; j < vectors; j++)
            sum[i * vectors + j] =
                add ? _mm512_loadu_ps(out + i * out_row + LANES * j) : _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++) {
        /* Of factors and columns, the fewer stay in registers. */
        __m512bh kept[SUMS / 3];
        if (count < vectors) {
            for (int i = 0; i < count; i++)
                kept[i] = (__m512bh)_mm512_set1_epi32((int)left[i][p]);
            for (int j = 0; j < vectors; j++) {
                const __m512bh column = pairs_of(right + p * right_row + LANES * j);
                for (int i = 0; i < count; i++)
                    sum[i * vectors + j] =
                        _mm512_dpbf16_ps(sum[i * vectors + j], column, kept[i]);
            }
        } else {
            for (int j = 0; j < vectors; j++)
                kept[j] = pairs_of(right + p * right_row + LANES * j);
            for (int i = 0; i < count; i++) {
                const __m512bh factor = (__m512bh)_mm512_set1_epi32((int)left[i][p]);
                for (int j = 0; j < vectors; j++)
                    sum[i * vectors + j] =
                        _mm512_dpbf16_ps(sum[i * vectors + j], kept[j], factor);
            }
        }
    }
    for (int i = 0; i < count; i++)
        for (int j = 0; j < vectors; j++)
            _mm512_storeu_ps(out + i * out_row + LANES * j, sum[i * vectors + j]);
}

INLINE int64_t multiply_rows(const int count, const int vectors, int64_t done, int64_t num_rows,
                             rows_of_pairs rows, int64_t pairs, const pair *right,
                             int64_t right_row, float *out, int64_t out_row, int add) {
    for (; done + count <= num_rows; done += count) {
        const pair *left[ROWS_AT_ONCE];
        for (int i = 0; i < count; i++)
            left[i] = row_of(rows, done + i);
        multiply_tile(count, vectors, left, pairs, right, right_row, out + done * out_row, out_row,
                      add);
    }
    return done;
}

INLINE void multiply_columns(const int vectors, int64_t num_rows, rows_of_pairs rows, int64_t pairs,
                             const pair *right, int64_t right_row, float *out, int64_t out_row,
                             int add) {
    const int many = SUMS / vectors < ROWS_AT_ONCE ? SUMS / vectors : ROWS_AT_ONCE;
    int64_t done = 0;
    done = multiply_rows(many, vectors, done, num_rows, rows, pairs, right, right_row, out, out_row,
                         add);
    if (many > 3)
        done = multiply_rows(3, vectors, done, num_rows, rows, pairs, right, right_row, out,
                             out_row, add);
    multiply_rows(1, vectors, done, num_rows, rows, pairs, right, right_row, out, out_row, add);
}

/* out (num_rows, width) = rows (num_rows, pairs) x right (pairs, width), or added to what is there.
   How a row's sums are taken does not depend on the rows beside it. */
static void multiply(int64_t num_rows, rows_of_pairs rows, int64_t pairs, const pair *right,
                     int64_t right_row, int64_t width, float *out, int64_t out_row, int add) {
    int64_t vectors = width / LANES;
#define COLUMNS(count)                                                                             \
    do {                                                                                           \
        multiply_columns(count, num_rows, rows, pairs, right, right_row, out, out_row, add);       \
        right += (count) * LANES;                                                                  \
        out += (count) * LANES;                                                                    \
        vectors -= count;                                                                          \
    } while (0)
    while (vectors >= 8)
        COLUMNS(8);
    if (vectors >= 4)
        COLUMNS(4);
    if (vectors >= 2)
        COLUMNS(2);
    if (vectors)
        COLUMNS(1);
#undef COLUMNS
}

/* 2^x for x <= 0, to 3e-6 of it, where masses are rounded to 2e-3; and 2e-38 at least: much smaller
   numbers are slow on some processors. What is no number stays none. */
INLINE __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-125.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, 0), rest = _mm512_sub_ps(x, whole);
    __m512 series = _mm512_set1_ps(9.5701022e-3f); /* least largest error for rests up to a half */
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(5.59178628e-2f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(0.240247443f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(0.693121791f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(0.999999285f));
    return _mm512_scalef_ps(series, whole);
}

INLINE void store_rounded(number *to, __m512 values) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values));
}

/* Masses exp(scale x (score - largest)) of the tokens that each query sees, rounded; their sum, of
   unrounded ones, is put in the place of a query's first score. What is largest is found for all
   queries first, and kept at the beginning of their outcomes, `D` apart: one query's would have to
   be waited for. */
INLINE void masses_of(int64_t count, float *score, number *mass, float *outcome, int64_t width,
                      int64_t D, float scale) {
    for (int64_t i = 0; i < count; i++) {
        __m512 largest = _mm512_set1_ps(NEVER);
        for (int64_t t = 0; t < width; t += LANES)
            largest = _mm512_max_ps(largest, _mm512_loadu_ps(score + i * width + t));
        outcome[i * D] = _mm512_reduce_max_ps(largest);
    }
    const __m512 binary_scale = _mm512_set1_ps(1.44269504f * scale);
    for (int64_t i = 0; i < count; i++) {
        const __m512 largest = _mm512_set1_ps(outcome[i * D]);
        __m512 total = _mm512_setzero_ps();
        for (int64_t t = 0; t < width; t += LANES) {
            const __m512 below = _mm512_sub_ps(_mm512_loadu_ps(score + i * width + t), largest);
            const __m512 masses = power_of_two(_mm512_mul_ps(below, binary_scale));
            total = _mm512_add_ps(total, masses);
            store_rounded(mass + i * width + t, masses);
        }
        score[i * width] = _mm512_reduce_add_ps(total);
    }
}

/* The first of two tokens makes its pair's other half zero, so that nothing else ever has to be. */
INLINE void append(pair *keys, pair *values, const pair *key, const number *value, int64_t room,
                   int64_t newest, int64_t D) {
    for (int64_t p = 0; p < D / 2; p++)
        keys[p * room + newest] = key[p];
    values += newest / 2 * D;
    if (newest % 2 == 0)
        for (int64_t d = 0; d < D; d++)
            values[d] = value[d];
    else
        for (int64_t d = 0; d < D; d++)
            values[d] |= (pair)value[d] << 16;
}

/* Where each query's outcome goes: R heads side by side, then the same `row` further. */
INLINE void store_attended(int64_t count, const float *attended, const float *total,
                           int64_t total_row, number *out, int64_t R, int64_t row, int64_t D) {
    for (int64_t i = 0; i < count; i++) {
        const __m512 sum = _mm512_set1_ps(total[i * total_row]);
        number *to = out + i / R * row + i % R * D;
        for (int64_t d = 0; d < D; d += LANES)
            store_rounded(to + d, _mm512_div_ps(_mm512_loadu_ps(attended + i * D + d), sum));
    }
}

/* How many rows, or tokens of one, go together: 24 queries or so, whose scores stay in cache. */
static int64_t together_of(int64_t R) { return R < 24 ? 24 / R : 1; }

/* Floats that each thread needs in `space` for scores, masses and outcomes of `width` tokens. */
static int64_t space_of_queries(int64_t R, int64_t D, int64_t width) {
    return PADDED(together_of(R) * R * (width + width / 2 + D));
}

int64_t space_needed(int64_t R, int64_t D, int64_t P, int64_t S) {
    return space_of_queries(R, D, PADDED(P) + PADDED(S));
}

int64_t whole_space_needed(int64_t R, int64_t D, int64_t L) {
    return PADDED(L) * D + space_of_queries(R, D, PADDED(L));
}

/* query and out (N, K, R, D), key and value (N, K, D) of the newest token; own tokens have room for
   `room`, a multiple of 16. */
void attend(const number *query, const number *key, const number *value, pair *own_keys,
            pair *own_values, const pair *prefix_keys, const pair *prefix_values, number *out,
            float *space, int64_t N, int64_t G, int64_t K, int64_t R, int64_t D, int64_t P,
            int64_t room, int64_t S, float scale, int32_t threads) {
    const int64_t P16 = PADDED(P), S16 = PADDED(S), width = P16 + S16;
    const int64_t rows = N / G, together = together_of(R);
    const int64_t blocks = (rows + together - 1) / together;
    const int64_t head_keys = D / 2 * room, head_values = room / 2 * D; /* of one row */
#pragma omp parallel num_threads(threads)
    {
        float *score = space + omp_get_thread_num() * space_needed(R, D, P, S);
        float *attended = score + together * R * width;
        number *mass = (number *)(attended + together * R * D);
        const rows_of_pairs masses = {(const pair *)mass, 1, 0, width / 2};
#pragma omp for schedule(static)
        for (int64_t item = 0; item < G * K * blocks; item++) {
            const int64_t prefix_head = item / blocks, k = prefix_head % K;
            const int64_t end = (prefix_head / K + 1) * rows;
            const int64_t first = end - rows + item % blocks * together;
            const int64_t count = end - first < together ? end - first : together;
            const int64_t place = (first * K + k) * R * D; /* of the first query */
            const rows_of_pairs queries = {(const pair *)(query + place), R, D / 2, K * R * D / 2};

            multiply(count * R, queries, D / 2, prefix_keys + prefix_head * (D / 2) * P16, P16, P16,
                     score, width, 0);
            for (int64_t n = 0; n < count; n++) {
                const int64_t head = (first + n) * K + k;
                pair *keys = own_keys + head * head_keys;
                append(keys, own_values + head * head_values, (const pair *)(key + head * D),
                       value + head * D, room, S - 1, D);
                const rows_of_pairs of_row = {row_of(queries, n * R), R, D / 2, 0};
                multiply(R, of_row, D / 2, keys, room, S16, score + n * R * width + P16, width, 0);
            }

            for (int64_t i = 0; i < count * R; i++) {
                float *scores = score + i * width;
                for (int64_t t = P; t < P16; t++)
                    scores[t] = NEVER;
                for (int64_t t = P16 + S; t < width; t++)
                    scores[t] = NEVER;
            }
            masses_of(count * R, score, mass, attended, width, D, scale);

            multiply(count * R, masses, P16 / 2, prefix_values + prefix_head * (P16 / 2) * D, D, D,
                     attended, D, 0);
            for (int64_t n = 0; n < count; n++) {
                const pair *values = own_values + ((first + n) * K + k) * head_values;
                const rows_of_pairs own = {row_of(masses, n * R) + P16 / 2, 1, 0, width / 2};
                multiply(R, own, (S + 1) / 2, values, D, D, attended + n * R * D, D, 1);
            }

            store_attended(count * R, attended, score, width, out + place, R, K * R * D, D);
        }
    }
}

/* query and out (N, L, K, R, D), key and value (N, L, K, D), of which the first `lengths` tokens of
   a row are its own; the rest is padding, which nobody sees and which comes out as zeros. A token
   sees all of its row, or no later one if `causal`. */
void attend_whole(const number *query, const number *key, const number *value,
                  const int64_t *lengths, number *out, float *space, int64_t N, int64_t L,
                  int64_t K, int64_t R, int64_t D, float scale, int32_t causal, int32_t threads) {
    const int64_t L16 = PADDED(L), together = together_of(R), row = K * R * D;
#pragma omp parallel num_threads(threads)
    {
        pair *keys = (pair *)space + omp_get_thread_num() * whole_space_needed(R, D, L);
        pair *values = keys + D / 2 * L16;
        float *score = (float *)(values + L16 / 2 * D);
        float *attended = score + together * R * L16;
        number *mass = (number *)(attended + together * R * D);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < N * K; item++) {
            const int64_t n = item / K, k = item % K, length = lengths[n];
            for (int64_t t = 0; t < length; t++) {
                const int64_t place = ((n * L + t) * K + k) * D;
                append(keys, values, (const pair *)(key + place), value + place, L16, t, D);
            }
            /* Masses of padding are next to nothing, but times what is no number they are none. */
            for (int64_t v = (length + 1) / 2 * D; v < L16 / 2 * D; v++)
                values[v] = 0;
            for (int64_t first = 0; first < length; first += together) {
                const int64_t count = length - first < together ? length - first : together;
                const int64_t width = PADDED(causal ? first + count : length);
                const int64_t place = ((n * L + first) * K + k) * R * D;
                const rows_of_pairs queries = {(const pair *)(query + place), R, D / 2, row / 2};
                const rows_of_pairs masses = {(const pair *)mass, 1, 0, width / 2};
                multiply(count * R, queries, D / 2, keys, L16, width, score, width, 0);
                for (int64_t i = 0; i < count * R; i++) {
                    float *scores = score + i * width;
                    for (int64_t t = causal ? first + i / R + 1 : length; t < width; t++)
                        scores[t] = NEVER;
                }
                masses_of(count * R, score, mass, attended, width, D, scale);
                multiply(count * R, masses, width / 2, values, D, D, attended, D, 0);
                store_attended(count * R, attended, score, width, out + place, R, row, D);
            }
            for (int64_t t = length; t < L; t++)
                for (int64_t d = 0; d < R * D; d++)
                    out[((n * L + t) * K + k) * R * D + d] = 0;
        }
    }
}
