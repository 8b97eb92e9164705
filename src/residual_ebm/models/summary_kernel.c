/* What is asked of rows of logits over a vocabulary, in one pass over their memory: for processors
   with AVX-512. Logits are bfloat16, sums float32.

   Shapes: R rows, V vocabulary, K chunks of it, of CHUNK tokens each but for the last. */

#include <immintrin.h>
#include <omp.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define CHUNK 256
#define NEVER -1e4f   /* a log mass whose exponential is zero */
#define LOWEST -1e30f /* below the largest logit of a chunk of which any token can come */
#define MINUS_INFINITY 0xff80
#define LOG2_OF_E 1.44269504f
#define LN_OF_2 0.693147181f

typedef uint16_t number; /* a bfloat16 */

INLINE __m512 wide(const number *place) {
    const __m512i halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)place));
    return (__m512)_mm512_slli_epi32(halves, 16);
}

/* 2^x for x <= 0, to 2e-7 of it, and 2^0 is 1: no log-prob may come out above 0. Nothing at all
   below 2^-125: what cannot come has no mass. What is no number stays none. */
INLINE __m512 mass_of(__m512 exponent) {
    const __m512 least = _mm512_set1_ps(-125.0f);
    const __mmask16 nothing = _mm512_cmp_ps_mask(exponent, least, _CMP_LT_OQ);
    exponent = _mm512_max_ps(least, exponent);
    const __m512 whole = _mm512_roundscale_ps(exponent, 0);
    const __m512 rest = _mm512_sub_ps(exponent, whole); /* up to a half: six terms of Taylor's */
    __m512 series = _mm512_set1_ps(1.54035304e-4f);
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(1.33335581e-3f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(9.61812911e-3f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(5.55041087e-2f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(0.240226507f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(0.693147181f));
    series = _mm512_fmadd_ps(series, rest, _mm512_set1_ps(1.0f));
    return _mm512_mask_mov_ps(_mm512_scalef_ps(series, whole), nothing, _mm512_setzero_ps());
}

/* Keeps what is no number: the second factor is given back then. */
INLINE __m512 at_least(float least, __m512 values) {
    return _mm512_max_ps(_mm512_set1_ps(least), values);
}

/* A chunk's largest logit, the sum of its masses exp(logit - largest), and of mass x log mass. */
INLINE void summarise_chunk(const number *logits, float *top, float *mass, float *expected) {
    __m512 value[CHUNK / LANES];
    __m512 largest = _mm512_set1_ps(LOWEST);
    for (int j = 0; j < CHUNK / LANES; j++) {
        value[j] = wide(logits + j * LANES);
        largest = _mm512_max_ps(largest, value[j]);
    }
    *top = _mm512_reduce_max_ps(largest);
    largest = _mm512_set1_ps(*top);
    __m512 total = _mm512_setzero_ps(), weighted = _mm512_setzero_ps();
    for (int j = 0; j < CHUNK / LANES; j++) {
        const __m512 below = _mm512_sub_ps(value[j], largest);
        const __m512 exponent = _mm512_mul_ps(below, _mm512_set1_ps(LOG2_OF_E));
        const __m512 masses = mass_of(exponent);
        total = _mm512_add_ps(total, masses);
        weighted = _mm512_fmadd_ps(masses, at_least(NEVER, exponent), weighted);
    }
    *mass = _mm512_reduce_add_ps(total);
    *expected = LN_OF_2 * _mm512_reduce_add_ps(weighted);
}

/* Masses of chunks from their own largest to that of all; gives the sum of mass x log mass. */
INLINE float of_all_chunks(int64_t K, const float *top, const float *expected, float *mass,
                           float *largest_of_all) {
    __m512 largest = _mm512_set1_ps(LOWEST);
    for (int64_t k = 0; k < K; k += LANES) {
        const __mmask16 there = K - k < LANES ? (1 << (K - k)) - 1 : 0xffff;
        largest = _mm512_mask_max_ps(largest, there, largest, _mm512_maskz_loadu_ps(there, top + k));
    }
    *largest_of_all = _mm512_reduce_max_ps(largest);
    largest = _mm512_set1_ps(*largest_of_all);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < K; k += LANES) {
        const __mmask16 there = K - k < LANES ? (1 << (K - k)) - 1 : 0xffff;
        const __m512 tops = _mm512_mask_loadu_ps(largest, there, top + k);
        const __m512 shift = at_least(NEVER, _mm512_sub_ps(tops, largest));
        const __m512 scale = mass_of(_mm512_mul_ps(shift, _mm512_set1_ps(LOG2_OF_E)));
        const __m512 masses = _mm512_maskz_loadu_ps(there, mass + k);
        const __m512 log_masses = _mm512_maskz_loadu_ps(there, expected + k);
        sum = _mm512_fmadd_ps(_mm512_fmadd_ps(masses, shift, log_masses), scale, sum);
        _mm512_mask_storeu_ps(mass + k, there, _mm512_mul_ps(masses, scale));
    }
    return _mm512_reduce_add_ps(sum);
}

/* logits (R, V); largest and expected (R), mass and top (R, K); K floats of space a thread. */
void summarise(const number *logits, float *largest, float *mass, float *expected, float *top,
               float *space, int64_t R, int64_t V, int32_t threads) {
    const int64_t K = (V + CHUNK - 1) / CHUNK, whole = V / CHUNK;
#pragma omp parallel num_threads(threads)
    {
        float *of_chunk = space + omp_get_thread_num() * K;
        number last[CHUNK];
        for (int i = 0; i < CHUNK; i++)
            last[i] = MINUS_INFINITY;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < R; r++) {
            const number *row = logits + r * V;
            float *tops = top + r * K, *masses = mass + r * K;
            for (int64_t k = 0; k < whole; k++)
                summarise_chunk(row + k * CHUNK, tops + k, masses + k, of_chunk + k);
            if (whole < K) {
                for (int64_t v = whole * CHUNK; v < V; v++)
                    last[v - whole * CHUNK] = row[v];
                summarise_chunk(last, tops + whole, masses + whole, of_chunk + whole);
            }
            expected[r] = of_all_chunks(K, tops, of_chunk, masses, largest + r);
        }
    }
}
