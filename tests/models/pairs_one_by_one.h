/* The two instructions of AVX-512 BF16 that the kernel takes, by those that other processors with
   AVX-512 have: a bfloat16 is the upper half of a float32. Put in front of the kernel's source, so
   that it is tested there as well. */

#include <immintrin.h>

#define ALWAYS static inline __attribute__((always_inline))

ALWAYS __m512 first_of(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }

ALWAYS __m512 second_of(__m512i pairs) {
    return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000));
}

ALWAYS __m512 add_products(__m512 sum, __m512i left, __m512i right) {
    sum = _mm512_fmadd_ps(second_of(left), second_of(right), sum);
    return _mm512_fmadd_ps(first_of(left), first_of(right), sum);
}

/* To the nearest, of two the even one; what is no number stays none. */
ALWAYS __m256i rounded(__m512 values) {
    const __m512i bits = (__m512i)values, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16),
                                                                 _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
    const __mmask16 number = _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q);
    const __m512i sum = _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), number, bits, up);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
}

#define __m512bh __m512i
#define _mm512_dpbf16_ps add_products
#define _mm512_cvtneps_pbh rounded
