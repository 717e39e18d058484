// The ideal kernel's work on a tile of scores on a GPU, without the two products. ideal.py computes
// the same with torch operations, and defines the sizes in capitals. Every operation is rounded
// separately, by intrinsics that the compiler does not fuse. The host passes integers as 8 bytes, of
// which an int is the lower four. Each warp processes one line, a query row of a head.

#define LINES (THREADS / 32)  // lines per block
#define INFINITE __int_as_float(0x7f800000)

// The maximum, or NaN if either is NaN.
__device__ float larger(float x, float y) { return x != x || x > y ? x : y; }

// The maximum with 0 in place of −∞, that of a row that has seen no key.
__device__ float finite(float maximum) { return maximum == -INFINITE ? 0 : maximum; }

// exp2, rounded once; 0 where the score is −∞, also where −∞ · c is NaN.
__device__ float power(float exponent, float score) {
    return score == -INFINITE ? 0 : (float)exp2((double)exponent);
}

// The factor that makes a weight relative to ``old`` relative to ``base``.
__device__ float factor(float old, float base, float c) {
    return power(__fmul_rn(__fsub_rn(old, base), c), old);
}

// Round a weight to the format that P·V reads.
__device__ float round_to(float x, int format) {
    unsigned short bits;
    if (format == 1) {  // bf16
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        return __uint_as_float((unsigned)bits << 16);
    }
    if (format == 2) {  // fp16
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    }
    return x;
}

#ifdef WEIGH
// Compute a tile's weights, update maximum and row sum, and store the factors of O (``out_factor``)
// and of the tile's P·V (``part_factor``) in their sum. ``by_step`` means FlashAttention-1, whose
// weights are relative to the tile's own maximum. With ``natural`` scores, c multiplies their
// difference, not each score. A null ``seen`` means that all keys are visible.
extern "C" __global__ void __launch_bounds__(THREADS) ideal_weigh(
        const float *scores, const unsigned char *seen, float *weights, float *maximum,
        float *total, float *out_factor, float *part_factor, const float *factors, double lazy,
        int lines, int keys, int rows, int heads, int by_step, int natural, int format,
        long by_batch, long by_head, long by_row, long by_key) {
    int line = blockIdx.x * LINES + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (line >= lines) return;
    int head = line / rows;
    if (seen) seen += head / heads * by_batch + head % heads * by_head + line % rows * by_row;
    float c = factors[head], old = maximum[line], largest = -INFINITE, sum = 0, s[KEYS / 32];
    scores += (long)line * keys, weights += (long)line * keys;
    #pragma unroll
    for (int i = 0; i < KEYS / 32; i++) {
        int key = lane + 32 * i;
        s[i] = -INFINITE;
        if (key < keys && (!seen || seen[key * by_key])) s[i] = scores[key];
        largest = larger(largest, s[i]);
    }
    for (int bit = 16; bit; bit /= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, bit));
    float now = larger(old, largest);
    if (lazy && old != -INFINITE && __fmul_rn(__fsub_rn(now, old), c) <= (float)lazy) now = old;
    float base = finite(by_step ? largest : now), shift = -__fmul_rn(base, c);
    #pragma unroll
    for (int i = 0; i < KEYS / 32; i++) {
        // As in torch: in float64 the product is exact and the sum is rounded.
        float p = power(natural ? __fmul_rn(__fsub_rn(s[i], base), c)
                                : (float)__dadd_rn(shift, __dmul_rn(s[i], c)), s[i]);
        sum = __fadd_rn(sum, p);
        int key = lane + 32 * i;
        if (key < keys) weights[key] = round_to(p, format);
    }
    for (int bit = 16; bit; bit /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, bit));
    if (lane) return;
    float alpha = factor(old, finite(now), c), beta = by_step ? factor(largest, finite(now), c) : 1;
    maximum[line] = now, part_factor[line] = beta;
    float before = __fmul_rn(total[line], alpha);
    out_factor[line] = by_step ? before : alpha;
    total[line] = __fadd_rn(before, __fmul_rn(beta, sum));
}
#else
// O after a tile: out_factor · O + part_factor · P·V, divided by the row sum in FlashAttention-1.
extern "C" __global__ void __launch_bounds__(THREADS) ideal_add(
        float *out, const float *part, const float *out_factor, const float *part_factor,
        const float *total, int lines, int dim, int by_step) {
    int line = blockIdx.x * LINES + threadIdx.x / 32;
    if (line >= lines) return;
    float a = out_factor[line], b = part_factor[line], sum = total[line] == 0 ? 1 : total[line];
    out += (long)line * dim, part += (long)line * dim;
    for (int i = threadIdx.x % 32; i < dim; i += 32) {
        float x = __fadd_rn(__fmul_rn(a, out[i]), __fmul_rn(b, part[i]));
        out[i] = by_step ? __fdiv_rn(x, sum) : x;
    }
}
#endif
