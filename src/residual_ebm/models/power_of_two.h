/* What kernels of ours have in common. */

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define LOG2_OF_E 1.44269504f

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
