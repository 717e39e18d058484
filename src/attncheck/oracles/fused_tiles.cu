// Tiles of attention in float64 on a Hopper GPU; fused_tiles.py defines the sizes in capitals. It
// passes all integers as eight bytes, of which an int parameter reads the lower four.
//
// A warp multiplies 16 rows of A by 8 rows of B over 16 dimensions. A thread, with its group (of 8)
// and its place (of 4) in the group, holds rows group and group + 8 of A, row group of B, and four
// of the dimensions. Any four will do if A and B agree, since the sum is over all. It gets columns
// 2 · place and 2 · place + 1 of both rows of the result.

typedef const unsigned char *Mask;

// Adds a warp's product of 16 × 8 × 16 to sums: two columns of row group, then two of group + 8.
__device__ void multiply(double sums[4], const double a[8], const double b[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
          "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

// Loads four neighbouring dimensions of a row into ``to`` with stride ``every``.
__device__ void four(double *to, int every, const double *row) {
    double2 one = *(const double2 *)row, two = *(const double2 *)(row + 2);
    to[0] = one.x, to[every] = one.y, to[2 * every] = two.x, to[3 * every] = two.y;
}

// Copies LINES of WIDTH numbers to shared memory, from line ``first`` on. Lines beyond ``count``
// repeat the last one; their weights are 0. Eight threads copy sixteen numbers of a line. The line
// is a compile-time constant plus the thread's offset, so that an address costs one multiplication.
template <int LINES, int WIDTH, int THREADS>
__device__ void fetch(double *to, int pitch, const double *from, int stride, int first, int count) {
    const int together = THREADS / 8, parts = LINES * (WIDTH / 16);
    int number = threadIdx.x / 8 % together, at = threadIdx.x % 8 * 2;
    unsigned target = (unsigned)__cvta_generic_to_shared(to + at);
    const char *source = (const char *)(from + at);
    int bytes = stride * 8;
    #pragma unroll
    for (int i = 0; i < parts; i += together) {
        if (parts % together && number + i >= parts) break;
        int line = (number + i) % LINES, part = (number + i) / LINES;
        if (together % LINES == 0) line = number % LINES, part = number / LINES + i / LINES;
        if (LINES % together == 0) line = number + i % LINES, part = i / LINES;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(target + (line * pitch + part * 16) * 8),
                        "l"(source + min(first + line, count - 1) * (long)bytes + part * 128)
                     : "memory");
    }
}

__device__ void fetched() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// exp for |x| < 700: with this assumption the compiler makes no branch for an overflow.
__device__ double exponential(double x) {
    __builtin_assume(fabsf(__int_as_float(__double2hiint(x))) < 4.18359375f);  // the bits of 700
    return exp(x);
}

// Sets bits of the 32 keys from ``key`` on that rows group and group + 8 see, and returns the union
// over the warp's 16 rows. ``row`` points to the mask's row number lane % 16 of the warp.
__device__ unsigned sees(unsigned bits[2], Mask row, bool there, int key, int keys, long stride) {
    int lane = threadIdx.x % 32, group = lane / 4;
    unsigned any = 0;
    bits[0] = bits[1] = 0;
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        Mask at = (Mask)__shfl_sync(~0u, (unsigned long)row, i);
        bool inside = __shfl_sync(~0u, (int)there, i) && key + lane < keys;
        unsigned word = __ballot_sync(~0u, inside && at[(key + lane) * stride]);
        if (i == group) bits[0] = word;
        if (i == group + 8) bits[1] = word;
        any |= word;
    }
    return any;
}

// Returns the mask's row of a row of a key head, whose rows are those of its query heads.
__device__ Mask mask_row(Mask seen, int head, int row, int rows, int kv_heads, int of_head,
                         long by_batch, long by_head, long by_row) {
    int first = head % kv_heads * (rows / of_head);
    return seen + head / kv_heads * by_batch + (first + row / of_head) * by_head
           + row % of_head * by_row;
}

#ifdef FORWARD
// sums += exp(scale · q·kᵀ) · (v and a column of ones), for ROWS rows and all keys; 16 rows a warp.
// ``kinds`` has 0, 1 or 2 for ROWS rows by CELL keys that see nothing, something or everything.
extern "C" __global__ void __launch_bounds__(WARPS * 32) fused_tiles(
        double *sums, const double *q, const double *k, const double *v, Mask seen, Mask kinds,
        double scale, int rows, int keys, int kv_heads, int of_head,
        long sums_head, long sums_row,
        long q_head, int q_row, long k_head, int k_row, long v_head, int v_row,
        long by_batch, long by_head, long by_row, long by_key,
        long kind_batch, long kind_head, long kind_row, long kind_cell) {
    extern __shared__ double shared[];
    const int k_pitch = DIM + 2, v_pitch = VALUE + 2;  // padded against bank conflicts
    // If registers hold the queries, the second stage reuses their shared memory.
    double *stages = shared, *queries = shared + (HELD ? 1 : 2) * KEYS * (k_pitch + v_pitch);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
    // The last rows start first, since they take longest under a causal mask.
    int first = (gridDim.x - 1 - blockIdx.x) * ROWS, head = blockIdx.y, mine = first + warp * 16;
    q += head * q_head, k += head * k_head, v += head * v_head, sums += head * sums_head;
    if (kinds)
        kinds = mask_row(kinds, head, first, rows, kv_heads, of_head, kind_batch, kind_head, 0)
                + first % of_head / ROWS * kind_row;
    bool there = mine + lane % 16 < rows;
    Mask row = seen && there ? mask_row(seen, head, mine + lane % 16, rows, kv_heads, of_head,
                                        by_batch, by_head, by_row) : seen;
    // Bits of 32 cells: which see something, and which see everything.
    unsigned some = ~0u, every = seen ? 0 : ~0u;
    int known = kinds ? -1 : 0;
    // Returns the first tile from ``tile`` on that sees something, or one beyond the last.
    auto next = [&](int tile) -> int {
        while (kinds && tile * KEYS < keys) {
            int cell = tile * KEYS / CELL;
            if (cell / 32 != known) {
                known = cell / 32;
                int mine = known * 32 + lane;
                int kind = mine * CELL < keys ? kinds[mine * kind_cell] : 0;
                some = __ballot_sync(~0u, kind), every = __ballot_sync(~0u, kind == 2);
            }
            unsigned left = some >> cell % 32;
            if (left & 1) break;
            tile = (left ? cell + __ffs(left) - 1 : (known + 1) * 32) * (CELL / KEYS);
        }
        return tile;
    };
    auto ahead = [&](int tile, int stage) {
        double *to = stages + stage * KEYS * (k_pitch + v_pitch);
        fetch<KEYS, DIM, WARPS * 32>(to, k_pitch, k, k_row, tile * KEYS, keys);
        fetch<KEYS, VALUE, WARPS * 32>(to + KEYS * k_pitch, v_pitch, v, v_row, tile * KEYS, keys);
        fetched();
    };
    fetch<ROWS, DIM, WARPS * 32>(queries, k_pitch, q, q_row, first, rows);
    fetched();
    int tile = next(0);
    if (tile * KEYS < keys) ahead(tile, 0);
    double out[VALUE / 8][4] = {}, total[2] = {};
    const double *my_queries = queries + (warp * 16 + group) * k_pitch + 4 * place;
#if HELD
    double held[DIM / 16][8];
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    #pragma unroll
    for (int step = 0; step < DIM; step += 16) {
        four(held[step / 16], 2, my_queries + step);
        four(held[step / 16] + 1, 2, my_queries + 8 * k_pitch + step);
    }
#endif
    for (int stage = 0; tile * KEYS < keys; stage ^= 1) {
        int key = tile * KEYS;
        bool whole = every >> key / CELL % 32 & 1;
        tile = next(tile + 1);
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();  // all have read the stage that is overwritten next
        if (tile * KEYS < keys) ahead(tile, stage ^ 1);
        // Bits of the tile's keys (up to 32) that exist and that rows group and group + 8 see.
        unsigned any = keys - key < 32 ? (1u << keys - key) - 1 : ~0u, bits[2] = {any, any};
        if (!whole) any = sees(bits, row, there, key, keys, by_key);
        if (!any) continue;
        const double *from = stages + stage * KEYS * (k_pitch + v_pitch);
        const double *my_keys = from + group * k_pitch + 4 * place;
        double weights[KEYS / 8][4] = {};
        #pragma unroll
        for (int step = 0; step < DIM; step += 16) {
            double b[4];
#if HELD
            double *a = held[step / 16];
#else
            double a[8];
            four(a, 2, my_queries + step);
            four(a + 1, 2, my_queries + 8 * k_pitch + step);
#endif
            #pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                four(b, 1, my_keys + n * 8 * k_pitch + step);
                multiply(weights[n], a, b);
            }
        }
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                double weight = exponential(__dmul_rn(scale, weights[n][i]));
                if (!(bits[i / 2] >> (n * 8 + 2 * place + i % 2) & 1)) weight = 0.0;
                total[i / 2] += weight;
                weights[n][i] = weight;
            }
        const double *my_values = from + KEYS * k_pitch + 2 * place * v_pitch + group;
        #pragma unroll
        for (int j = 0; j < KEYS; j += 16) {
            // This thread's weights, in the order of its four keys.
            const double *w = weights[j / 8];
            double a[8] = {w[0], w[2], w[1], w[3], w[4], w[6], w[5], w[7]};
            #pragma unroll
            for (int n = 0; n < VALUE / 8; n++) {
                const double *at = my_values + j * v_pitch + n * 8;
                double b[4] = {at[0], at[v_pitch], at[8 * v_pitch], at[9 * v_pitch]};
                multiply(out[n], a, b);
            }
        }
    }
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
        int at = mine + half * 8 + group;
        if (at < rows) {
            double *line = sums + at * sums_row;
            if (place == 0) line[VALUE] += total[half];
            #pragma unroll
            for (int n = 0; n < VALUE / 8; n++)
                for (int i = 0; i < 2; i++)
                    line[n * 8 + 2 * place + i] += out[n][2 * half + i];
        }
    }
}
#else
// weights = exp(scale · q·kᵀ) and dx = weights · (loss·vᵀ + term): 64 × 64 a block, 32 × 32 a warp.
// The term of a row is in the column after its loss.
extern "C" __global__ void __launch_bounds__(128) fused_tiles(
        double *weights, double *dx, const double *q, const double *k, const double *loss,
        const double *v, Mask seen, double scale, int rows, int keys, int kv_heads, int of_head,
        long q_head, int q_row, long k_head, int k_row,
        long loss_head, int loss_row, long v_head, int v_row,
        long by_batch, long by_head, long by_row, long by_key) {
    extern __shared__ double shared[];
    const int pitch = 18, stage = 2 * 64 * pitch;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, place = lane % 4;
    int row0 = blockIdx.y * 64, key0 = blockIdx.x * 64, head = blockIdx.z;
    int warp_row = warp / 2 * 32, warp_key = warp % 2 * 32;
    q += head * q_head, k += head * k_head, loss += head * loss_head, v += head * v_head;

    unsigned bits[2][2] = {{~0u, ~0u}, {~0u, ~0u}};
    int all = (DIM + VALUE) / 16;
    if (seen) {
        unsigned any = 0;
        #pragma unroll
        for (int m = 0; m < 2; m++) {
            int mine = row0 + warp_row + m * 16 + lane % 16;
            Mask row = mine < rows ? mask_row(seen, head, mine, rows, kv_heads, of_head,
                                              by_batch, by_head, by_row) : seen;
            any |= sees(bits[m], row, mine < rows, key0 + warp_key, keys, by_key);
        }
        if (!__syncthreads_or(any)) all = 0;  // all weights are 0: skip the products
    }
    auto ahead = [&](int step) {
        if (step < all) {
            double *to = shared + step % STAGES * stage;
            bool second = step >= DIM / 16;
            int at = (second ? step - DIM / 16 : step) * 16;
            fetch<64, 16, 128>(to, pitch, (second ? loss : q) + at, second ? loss_row : q_row, row0, rows);
            fetch<64, 16, 128>(to + stage / 2, pitch, (second ? v : k) + at, second ? v_row : k_row, key0, keys);
        }
        fetched();
    };
    double scores[2][4][4] = {}, grads[2][4][4] = {};
    auto products = [&](double sums[2][4][4], int step) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        __syncthreads();  // all have read the stage that is overwritten next
        ahead(step + STAGES - 1);
        const double *from = shared + step % STAGES * stage + group * pitch + 4 * place;
        double a[2][8], b[4];
        #pragma unroll
        for (int m = 0; m < 4; m++)
            four(a[m / 2] + m % 2, 2, from + (warp_row + m * 8) * pitch);
        #pragma unroll
        for (int n = 0; n < 4; n++) {
            four(b, 1, from + stage / 2 + (warp_key + n * 8) * pitch);
            multiply(sums[0][n], a[0], b);
            multiply(sums[1][n], a[1], b);
        }
    };
    for (int step = 0; step < STAGES - 1; step++) ahead(step);
    for (int step = 0; step < DIM / 16 && all; step++) products(scores, step);
    // A thread stores pairs of neighbours in both tiles, so the number of keys must be even.
    int key = key0 + warp_key + 2 * place;
    auto line = [&](double *tile, int row) { return tile + ((long)head * rows + row) * keys + key; };
    #pragma unroll
    for (int i = 0; i < 4; i++) {  // these stores overlap the gradients' products
        int row = row0 + warp_row + i * 8 + group;
        #pragma unroll
        for (int n = 0; n < 4; n++) {
            double *weight = scores[i / 2][n] + i % 2 * 2;
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                weight[j] = exponential(__dmul_rn(scale, weight[j]));
                if (!(bits[i / 2][i % 2] >> (n * 8 + 2 * place + j) & 1)) weight[j] = 0.0;
            }
            if (row < rows && key + n * 8 < keys)
                *(double2 *)(line(weights, row) + n * 8) = {weight[0], weight[1]};
        }
    }
    for (int step = DIM / 16; step < all; step++) products(grads, step);
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = row0 + warp_row + i * 8 + group;
        double term = loss[(long)min(row, rows - 1) * loss_row + VALUE];
        #pragma unroll
        for (int n = 0; n < 4; n++) {
            double *weight = scores[i / 2][n] + i % 2 * 2, *grad = grads[i / 2][n] + i % 2 * 2;
            double2 pair = {weight[0] * (grad[0] + term), weight[1] * (grad[1] + term)};
            if (row < rows && key + n * 8 < keys) *(double2 *)(line(dx, row) + n * 8) = pair;
        }
    }
}
#endif
