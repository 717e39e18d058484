// What the ideal kernel does with a tile of scores besides its two products, on a GPU: ideal.py says
// the same in torch, operation by operation, and defines the sizes in capitals. Every operation is
// rounded by itself: none is left to the compiler to fuse. All whole numbers have eight bytes there:
// an int is the lower four. A warp has a line: a query row of a head.

#define LINES (THREADS / 32)  // of a block
#define INFINITE __int_as_float(0x7f800000)

// The larger one, or NaN.
__device__ float larger(float x, float y) { return x != x || x > y ? x : y; }

// 0 stands in for the maximum of a row that has seen nothing.
__device__ float finite(float maximum) { return maximum == -INFINITE ? 0 : maximum; }

// exp2, rounded once; 0 where the score is −∞, also where −∞ · c is NaN.
__device__ float power(float exponent, float score) {
    return score == -INFINITE ? 0 : (float)exp2((double)exponent);
}

// What a weight relative to ``old`` is multiplied by to be relative to ``base``.
__device__ float moved(float old, float base, float c) {
    return power(__fmul_rn(__fsub_rn(old, base), c), old);
}

// A weight as P·V reads it.
__device__ float rounded(float x, int format) {
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
// A tile's weights, and what they change: maximum and row sum, and what O (``kept``) and the tile's
// P·V (``taken``) are multiplied by before they are added. ``by_step`` is FlashAttention-1, whose
// weights are relative to the tile's own maximum. ``natural`` scores are subtracted before c is
// multiplied to them. No ``seen`` is everything.
extern "C" __global__ void __launch_bounds__(THREADS) ideal_weigh(
        const float *scores, const unsigned char *seen, float *weights, float *maximum,
        float *total, float *kept, float *taken, const float *factors, double lazy, int lines,
        int keys, int rows, int heads, int by_step, int natural, int format,
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
    for (int far = 16; far; far /= 2) largest = larger(largest, __shfl_xor_sync(~0u, largest, far));
    float now = larger(old, largest);
    if (lazy && old != -INFINITE && __fmul_rn(__fsub_rn(now, old), c) <= (float)lazy) now = old;
    float base = finite(by_step ? largest : now), shift = -__fmul_rn(base, c);
    #pragma unroll
    for (int i = 0; i < KEYS / 32; i++) {
        // The product is exact in float64, and the sum rounded there, as by torch.
        float p = power(natural ? __fmul_rn(__fsub_rn(s[i], base), c)
                                : (float)__dadd_rn(shift, __dmul_rn(s[i], c)), s[i]);
        sum = __fadd_rn(sum, p);
        int key = lane + 32 * i;
        if (key < keys) weights[key] = rounded(p, format);
    }
    for (int far = 16; far; far /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, far));
    if (lane) return;
    float alpha = moved(old, finite(now), c), beta = by_step ? moved(largest, finite(now), c) : 1;
    maximum[line] = now, taken[line] = beta;
    float before = __fmul_rn(total[line], alpha);
    kept[line] = by_step ? before : alpha;
    total[line] = __fadd_rn(before, __fmul_rn(beta, sum));
}
#else
// O after a tile: kept · O + taken · P·V, and divided by the row sum in FlashAttention-1.
extern "C" __global__ void __launch_bounds__(THREADS) ideal_add(
        float *out, const float *part, const float *kept, const float *taken, const float *total,
        int lines, int dim, int by_step) {
    int line = blockIdx.x * LINES + threadIdx.x / 32;
    if (line >= lines) return;
    float keep = kept[line], take = taken[line], sum = total[line] == 0 ? 1 : total[line];
    out += (long)line * dim, part += (long)line * dim;
    for (int i = threadIdx.x % 32; i < dim; i += 32) {
        float x = __fadd_rn(__fmul_rn(keep, out[i]), __fmul_rn(take, part[i]));
        out[i] = by_step ? __fdiv_rn(x, sum) : x;
    }
}
#endif
