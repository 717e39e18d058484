// One block of exp(scale · q·kᵀ), and with GRADIENT of that times (loss·vᵀ + term): TILE × TILE, in
// float64, a warp 32 × 32 of it. See fused_weights.py, which defines TILE, STEP, STAGES and ROW.

// Of every line, which lies along the dimensions, STEP of them; zeros beyond the last line.
__device__ void fetch(double *to, const double *from, long stride, int first, int lines) {
    for (int i = threadIdx.x; i < TILE * STEP / 2; i += blockDim.x) {
        int line = i / (STEP / 2), at = i % (STEP / 2) * 2;
        bool there = first + line < lines;
        const double *source = from + (there ? (first + line) * stride + at : 0);
        unsigned target = (unsigned)__cvta_generic_to_shared(to + line * ROW + at);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(target), "l"(source), "r"(there ? 16 : 0) : "memory");
    }
}

__device__ void multiply(double sums[4], const double a[8], const double b[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
        : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
          "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

// A thread's four of the 16 dimensions are neighbours: in which order they are added up is free,
// as long as both sides agree.
__device__ void products(double sums[2][4][4], const double *rows, const double *keys) {
    double a[2][8];
    #pragma unroll
    for (int m = 0; m < 2; m++)
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 4; i += 2) {
                double2 two = *(const double2 *)(rows + (m * 16 + half * 8) * ROW + i);
                a[m][2 * i + half] = two.x;
                a[m][2 * i + 2 + half] = two.y;
            }
    #pragma unroll
    for (int n = 0; n < 4; n++) {
        double b[4];
        for (int i = 0; i < 4; i += 2) {
            double2 two = *(const double2 *)(keys + n * 8 * ROW + i);
            b[i] = two.x;
            b[i + 1] = two.y;
        }
        for (int m = 0; m < 2; m++) multiply(sums[m][n], a[m], b);
    }
}

extern "C" __global__ void __launch_bounds__(TILE * TILE / 32) fused_weights(
        double *weights, double *dx, double *parts, const double *q, const double *k,
        const double *loss, const double *v, const unsigned char *seen, double scale,
        long rows, long keys, long head_dim, long value_dim, long kv_heads, long rows_of_head,
        long q_head, long q_row, long k_head, long k_row,
        long loss_head, long loss_row, long v_head, long v_row,
        long seen_batch, long seen_head, long seen_row, long seen_key) {
    extern __shared__ double shared[];
    int row0 = blockIdx.y * TILE, key0 = blockIdx.x * TILE, head = blockIdx.z;
    int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, place = threadIdx.x % 4;
    int warp_row = warp / (TILE / 32) * 32, warp_key = warp % (TILE / 32) * 32;
    q += head * q_head, k += head * k_head, loss += head * loss_head, v += head * v_head;
    // A key head's rows are those of the query heads that share it, one after the other.
    int per = rows_of_head, first_head = head % kv_heads * (rows / per);
    const unsigned char *mask = seen + head / kv_heads * seen_batch + first_head * seen_head;

    int steps = head_dim / STEP, all = steps;
    if (seen) {
        bool any = false;
        for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) {
            int row = row0 + i / TILE, key = key0 + i % TILE;
            if (row < rows && key < keys)
                any |= mask[row / per * seen_head + row % per * seen_row + key * seen_key];
        }
        if (!__syncthreads_or(any)) steps = all = 0;  // 0 whatever the products are
    }
#ifdef GRADIENT
    if (all) all += value_dim / STEP;
#endif
    auto ahead = [&](int step) {
        if (step < all) {
            double *to = shared + step % STAGES * 2 * TILE * ROW;
            bool second = step >= steps;
            int at = (second ? step - steps : step) * STEP;
            fetch(to, (second ? loss : q) + at, second ? loss_row : q_row, row0, rows);
            fetch(to + TILE * ROW, (second ? v : k) + at, second ? v_row : k_row, key0, keys);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    double scores[2][4][4] = {}, grads[2][4][4] = {};
    for (int step = 0; step < STAGES - 1; step++) ahead(step);
    for (int step = 0; step < all; step++) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        __syncthreads();  // what is overwritten next has been read by all
        ahead(step + STAGES - 1);
        const double *from = shared + step % STAGES * 2 * TILE * ROW + group * ROW + 4 * place;
        const double *a = from + warp_row * ROW, *b = from + (TILE + warp_key) * ROW;
        if (step < steps) products(scores, a, b);
        else products(grads, a, b);
    }

    #pragma unroll
    for (int m = 0; m < 2; m++)
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = row0 + warp_row + m * 16 + half * 8 + group;
            bool there = row < rows;
            long line = (head * rows + row) * keys;
            double sum = 0.0;
#ifdef GRADIENT
            double term = there ? loss[row * loss_row + value_dim] : 0.0;
#endif
            #pragma unroll
            for (int n = 0; n < 4; n++) {
                int key = key0 + warp_key + n * 8 + 2 * place;
                if (there && key < keys) {
                    double2 weight;
                    weight.x = exp(__dmul_rn(scale, scores[m][n][2 * half]));
                    weight.y = exp(__dmul_rn(scale, scores[m][n][2 * half + 1]));
                    if (seen) {
                        const unsigned char *at = mask + row / per * seen_head
                                                  + row % per * seen_row + key * seen_key;
                        if (!at[0]) weight.x = 0.0;
                        if (!at[seen_key]) weight.y = 0.0;
                    }
                    *(double2 *)(weights + line + key) = weight;
                    sum += weight.x + weight.y;
#ifdef GRADIENT
                    weight.x *= grads[m][n][2 * half] + term;
                    weight.y *= grads[m][n][2 * half + 1] + term;
                    *(double2 *)(dx + line + key) = weight;
#endif
                }
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            int part = blockIdx.x * (TILE / 32) + warp_key / 32;
            if (there && place == 0)
                parts[(head * rows + row) * gridDim.x * (TILE / 32) + part] = sum;
        }
}
