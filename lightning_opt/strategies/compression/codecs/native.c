/* The passes over a gradient that compression consists of, each in one go through memory.
 *
 * Plain C with the vector extension that GCC and Clang share. native.py compiles it, and every
 * function here has its counterpart in torch operations (selection.py, packing.py,
 * compressors.py), which gives the same bits. For that no multiplication may be fused with an
 * addition: compile with -ffp-contract=off.
 *
 * Tensors are contiguous float32. A function treats PIECE elements at a time, which stay in the
 * first-level cache from their first use to their last.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define PIECE 1024
#define GROUP 128 /* values that share a scale in a sparse message; packing.GROUP */
#define HEADER 16 /* bytes; packing.HEADER */
#define LANES 8
#define LINE 16 /* floats that a line of the cache holds */
#define WORD (4 * LANES) /* elements that lo_select looks at together, one bit each */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

static inline int32_t magnitude_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x7fffffff; /* in the order of the magnitudes */
}

static inline float from_bits(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* The lanes where the mask is set, one bit a lane, the first lane's the lowest. */
static inline uint32_t lanes_of(ints mask) {
#ifdef __AVX__
    return (uint32_t)__builtin_ia32_movmskps256((floats)mask);
#else
    int32_t lanes = 0;
    mask &= (ints){1, 2, 4, 8, 16, 32, 64, 128};
    for (int lane = 0; lane < LANES; lane++) lanes |= mask[lane];
    return (uint32_t)lanes;
#endif
}

static int32_t largest_bits(const float *x, int64_t n) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = magnitude_bits(x[i]);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Whether x holds neither NaN nor infinity. What is needed next, y, is fetched meanwhile. */
static int is_finite(const float *x, const float *y, int64_t n) {
    /* Whatever is not finite leaves no sum finite. One may also overflow; then each is looked at. */
    floats sums[4] = {{0}, {0}, {0}, {0}};
    float total[LANES];
    const int64_t whole = n - n % WORD;
    for (int64_t i = 0; i < whole; i += WORD) {
        for (int64_t j = 0; j < 4; j++) {
            floats values;
            memcpy(&values, x + i + j * LANES, sizeof values);
            sums[j] += values;
        }
        __builtin_prefetch(y + i);
        __builtin_prefetch(y + i + LINE);
    }
    sums[0] += sums[1] + (sums[2] + sums[3]);
    memcpy(total, sums, sizeof total);
    return (largest_bits(total, LANES) < 0x7f800000 || largest_bits(x, whole) < 0x7f800000) &&
           largest_bits(x + whole, n - whole) < 0x7f800000;
}

/* Add alpha * increment (unless NULL) to x; return the largest of what magnitude_bits then gives. */
static int32_t add(float *restrict x, const float *restrict increment, int64_t n, float alpha) {
    int32_t largest = 0;
    if (increment == NULL) return largest_bits(x, n);
    for (int64_t i = 0; i < n; i++) {
        float sum = x[i] + alpha * increment[i];
        int32_t bits = magnitude_bits(sum);
        x[i] = sum;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* --- selection ------------------------------------------------------------------------------ */

/* Add alpha * increment (unless NULL) to LANES elements; return where they reach the threshold. */
static inline ints reaches(float *x, const float *increment, floats alpha, floats threshold) {
    floats values, more;
    memcpy(&values, x, sizeof values);
    if (increment != NULL) {
        memcpy(&more, increment, sizeof more);
        values += alpha * more;
        memcpy(x, &values, sizeof values);
    }
    values = (floats)((ints)values & 0x7fffffff);
    return (ints)(values >= threshold);
}

/* Append what reaches the threshold among n elements, the first of which is number `first`. */
static int64_t list(const float *x, int64_t first, int64_t n, float threshold, int64_t *indices,
                    float *values, int64_t count) {
    for (int64_t i = 0; i < n; i++) { /* no branch: it would be guessed wrong */
        indices[count] = first + i;
        values[count] = x[i];
        count += fabsf(x[i]) >= threshold;
    }
    return count;
}

/* Add alpha * increment (unless NULL) to flat[start:], and append what then reaches the threshold
 * to indices and values, which hold *found of room elements.
 *
 * Returns how far it came: numel; an earlier place, with everything before it done, if the room
 * does not suffice for the next piece; or -1 - place if the increment is not finite in the piece
 * that begins at place, with everything before it done.
 */
static inline int64_t select_all(float *flat, const float *increment, float alpha, int64_t start,
                                 int64_t numel, float threshold, int64_t *indices,
                                 float *values, int64_t *found, int64_t room) {
    const floats thresholds = threshold - (floats){0}, alphas = alpha - (floats){0};
    uint32_t firsts[PIECE / WORD], hits[PIECE / WORD];
    int64_t count = *found;
    for (; start < numel; start += PIECE) {
        const int64_t n = lesser(numel - start, PIECE), whole = n - n % WORD;
        float *x = flat + start;
        const float *more = increment == NULL ? NULL : increment + start;
        if (room - count < n) break;
        if (more != NULL && !is_finite(more, x, n)) {
            *found = count;
            return -1 - start;
        }
        int64_t words = 0; /* with a hit; the others are overwritten, which takes no branch */
        for (int64_t i = 0; i < whole; i += WORD) {
            uint32_t word = 0;
            for (int64_t j = 0; j < 4; j++) {
                int64_t at = i + j * LANES;
                ints mask = reaches(x + at, more ? more + at : NULL, alphas, thresholds);
                word |= lanes_of(mask) << j * LANES;
            }
            if (more) __builtin_prefetch(more + i + PIECE);
            if (more) __builtin_prefetch(more + i + PIECE + LINE);
            firsts[words] = (uint32_t)i;
            hits[words] = word;
            words += word != 0;
        }
        for (int64_t w = 0; w < words; w++) {
            for (uint32_t left = hits[w]; left != 0; left &= left - 1) {
                int64_t i = firsts[w] + __builtin_ctz(left);
                indices[count] = start + i;
                values[count++] = x[i];
            }
        }
        if (more != NULL) add(x + whole, more + whole, n - whole, alpha);
        count = list(x + whole, start + whole, n - whole, threshold, indices, values, count);
    }
    *found = count;
    return lesser(start, numel);
}

int64_t lo_select(float *flat, const float *increment, float alpha, int64_t start, int64_t numel,
                  float threshold, int64_t *indices, float *values, int64_t *found, int64_t room) {
    if (increment == NULL)
        return select_all(flat, NULL, alpha, start, numel, threshold, indices, values, found, room);
    return select_all(flat, increment, alpha, start, numel, threshold, indices, values, found,
                      room);
}

/* Keep the k largest in magnitude of n elements, in their order; of equal ones at the edge the
 * first. Returns the k-th magnitude. 1 <= k <= n. */
float lo_largest(int64_t *indices, float *values, int64_t n, int64_t k) {
    /* The k-th largest bit pattern, from its highest digit to its lowest. */
    static const int shifts[] = {20, 10, 0};
    int32_t prefix = 0, known = 0;
    int64_t left = k;
    for (int round = 0; round < 3; round++) {
        int64_t counts[2048] = {0};
        int shift = shifts[round], digit = round == 0 ? 2047 : 1023;
        for (int64_t i = 0; i < n; i++) {
            int32_t bits = magnitude_bits(values[i]);
            counts[(bits >> shift) & digit] += (bits & known) == prefix;
        }
        int32_t d = digit;
        while (counts[d] < left) left -= counts[d--];
        prefix |= d << shift;
        known |= digit << shift;
    }
    /* `left` of those that equal the k-th still belong to it. */
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = magnitude_bits(values[i]);
        int equal = bits == prefix && left > 0;
        left -= equal;
        indices[kept] = indices[i];
        values[kept] = values[i];
        kept += bits > prefix || equal;
    }
    return from_bits(prefix);
}

/* --- sparse messages ------------------------------------------------------------------------ */

/* Where the parts of a message lie, as packing.SparseLayout has it. */
struct layout {
    int64_t numel, capacity, block, blocks;
    int64_t scales, codes, counts, offsets; /* first byte of each */
    int64_t wide;                           /* counts and offsets are int16, not uint8 */
    int64_t bf16;                           /* values are bfloat16, not int8 with scales */
};

static inline int64_t get_index(const uint8_t *part, int64_t i, int64_t wide) {
    int16_t x;
    if (!wide) return part[i];
    memcpy(&x, part + 2 * i, 2);
    return x;
}

static inline void put_index(uint8_t *part, int64_t i, int64_t wide, int64_t value) {
    int16_t x = (int16_t)value;
    if (wide)
        memcpy(part + 2 * i, &x, 2);
    else
        part[i] = (uint8_t)value;
}

/* The scale of the codes, and what multiplies values to get codes: 0 where the scale is subnormal. */
static inline float scale_of(int32_t largest, int levels, float *inverse) {
    float scale = from_bits(largest) / (float)levels;
    *inverse = scale >= 0x1p-126f ? 1.0f / scale : 0.0f;
    return scale;
}

/* Round to the nearest whole number, ties to even; for magnitudes below 2^22. */
static inline float rounded(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

static inline uint16_t to_bf16(float x) { /* to the nearest, ties to even, as torch does */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float from_bf16(const uint8_t *place) {
    uint16_t half;
    memcpy(&half, place, 2);
    return from_bits((int32_t)((uint32_t)half << 16));
}

static void write_header(uint8_t *message, int64_t count) {
    int32_t header[2] = {(int32_t)count, 0};
    memcpy(message, header, sizeof header);
}

/* Write a message of `count` elements, and take what it carries off flat. */
void lo_sparse_write(const struct layout *l, uint8_t *message, const int64_t *indices,
                     const float *values, int64_t count, float *flat) {
    int64_t block = 0, in_block = 0;
    for (int64_t i = 0; i < count; i++) {
        while (indices[i] >= (block + 1) * l->block) {
            put_index(message + l->counts, block++, l->wide, in_block);
            in_block = 0;
        }
        put_index(message + l->offsets, i, l->wide, indices[i] - block * l->block);
        in_block++;
    }
    for (; block < l->blocks; block++) {
        put_index(message + l->counts, block, l->wide, in_block);
        in_block = 0;
    }
    for (int64_t first = 0; first < count; first += GROUP) {
        int64_t n = lesser(count - first, GROUP);
        const float *x = values + first;
        float inverse, scale = 0.0f, codes[GROUP];
        if (l->bf16) {
            for (int64_t i = 0; i < n; i++) {
                uint16_t half = to_bf16(x[i]);
                memcpy(message + l->codes + 2 * (first + i), &half, 2);
                codes[i] = from_bits((int32_t)((uint32_t)half << 16));
            }
        } else {
            int8_t *out = (int8_t *)message + l->codes + first;
            scale = scale_of(largest_bits(x, n), 127, &inverse);
            memcpy(message + l->scales + first / GROUP * 4, &scale, 4);
            for (int64_t i = 0; i < n; i++) codes[i] = rounded(x[i] * inverse);
            for (int64_t i = 0; i < n; i++) out[i] = (int8_t)codes[i];
            for (int64_t i = 0; i < n; i++) codes[i] *= scale;
        }
        for (int64_t i = 0; i < n; i++) flat[indices[first + i]] = x[i] - codes[i];
    }
    write_header(message, count);
}

/* Add alpha times what each of `world` messages (`stride` bytes apart) carries to out, one message
 * after the other; set out to zero before that if `overwrite`. `cursors` has room for `world`.
 * Returns 0, or 1 if a message contradicts the layout. */
int lo_sparse_add(const struct layout *l, const uint8_t *messages, int64_t stride, int64_t world,
                  float *out, float alpha, int overwrite, int64_t *cursors) {
    /* Without anything to overwrite, one message after the other, else range by range. */
    const int64_t span = overwrite ? (8 * PIECE + l->block - 1) / l->block : l->blocks;
    for (int64_t rank = 0; rank < world; rank++) cursors[rank] = 0;
    for (int64_t first = 0; first < l->blocks; first += span) {
        int64_t last = lesser(first + span, l->blocks);
        if (overwrite) {
            int64_t start = first * l->block, end = lesser(last * l->block, l->numel);
            memset(out + start, 0, (size_t)(end - start) * 4);
        }
        for (int64_t rank = 0; rank < world; rank++) {
            const uint8_t *message = messages + rank * stride;
            const uint8_t *counts = message + l->counts, *offsets = message + l->offsets;
            int32_t count;
            memcpy(&count, message, 4);
            if (count == 0) continue; /* its counts are whatever was there before */
            int64_t i = cursors[rank];
            float scale = 0.0f;
            for (int64_t block = first; block < last; block++) {
                int64_t end = i + get_index(counts, block, l->wide);
                if (end > count || count > l->capacity) return 1;
                for (; i < end; i++) {
                    int64_t index = block * l->block + get_index(offsets, i, l->wide);
                    float value;
                    if (index >= l->numel) return 1;
                    if (l->bf16) {
                        value = from_bf16(message + l->codes + 2 * i) * alpha;
                    } else {
                        memcpy(&scale, message + l->scales + i / GROUP * 4, 4);
                        value = (float)(int8_t)message[l->codes + i] * (scale * alpha);
                    }
                    out[index] += value;
                }
            }
            cursors[rank] = i;
        }
    }
    return 0;
}

/* --- quantised messages --------------------------------------------------------------------- */

/* Codes of n elements (at most block, else the rest counts as 0) as one row of a message; take
 * what it carries off x. */
static void quantize_row(float *restrict x, int64_t n, int64_t block, int bits, float scale,
                         float inverse, uint8_t *restrict row) {
    if (bits == 8) {
        int8_t *codes = (int8_t *)row;
        for (int64_t i = 0; i < n; i++) {
            float code = rounded(x[i] * inverse);
            codes[i] = (int8_t)(int32_t)code;
            x[i] -= code * scale;
        }
        memset(codes + n, 0, (size_t)(block - n));
        return;
    }
    int64_t half = block / 2, both = n > half ? n - half : 0;
    for (int64_t i = 0; i < both; i++) {
        float low = rounded(x[i] * inverse), high = rounded(x[half + i] * inverse);
        row[i] = (uint8_t)((int32_t)low + 16 * (int32_t)high + 136);
        x[i] -= low * scale;
        x[half + i] -= high * scale;
    }
    for (int64_t i = both; i < lesser(n, half); i++) {
        float low = rounded(x[i] * inverse);
        row[i] = (uint8_t)((int32_t)low + 136);
        x[i] -= low * scale;
    }
    for (int64_t i = lesser(n, half); i < half; i++) row[i] = 136;
}

/* Add alpha * increment (unless NULL) to flat, write the sum's message but for its header, and take
 * what it carries off flat. Returns numel, or -1 - place as lo_select does. */
int64_t lo_quantize(float *flat, const float *increment, float alpha, int64_t numel, int bits,
                    int64_t block, uint8_t *message) {
    const int64_t blocks = (numel + block - 1) / block;
    const int64_t span = block < PIECE ? PIECE / block : 1;
    uint8_t *scales = message + HEADER, *codes = scales + 4 * blocks;
    for (int64_t first = 0; first < blocks; first += span) {
        int64_t last = lesser(first + span, blocks), start = first * block;
        int64_t length = lesser(last * block, numel) - start;
        if (increment != NULL && !is_finite(increment + start, flat + start, length)) return -1 - start;
        for (int64_t b = first; b < last; b++) {
            const float *more = increment == NULL ? NULL : increment + b * block;
            int64_t n = lesser(block, numel - b * block);
            float *x = flat + b * block, inverse;
            if (more != NULL)
                for (int64_t i = 0; i < n; i += LINE) __builtin_prefetch(more + n + i);
            float scale = scale_of(add(x, more, n, alpha), bits == 8 ? 127 : 7, &inverse);
            memcpy(scales + 4 * b, &scale, 4);
            quantize_row(x, n, block, bits, scale, inverse, codes + b * block * bits / 8);
        }
    }
    return numel;
}

/* Add scale * codes of n elements to out, or to zero if `fresh`. */
static inline void add_codes(float *restrict out, const int8_t *restrict codes, int64_t n,
                             float scale, int fresh) {
    for (int64_t i = 0; i < n; i++) out[i] = (fresh ? 0.0f : out[i]) + (float)codes[i] * scale;
}

/* The same for codes in the lower, or (shift 4) the upper half of each byte. */
static inline void add_halves(float *restrict out, const uint8_t *restrict row, int64_t n,
                              int shift, float scale, int fresh) {
    for (int64_t i = 0; i < n; i++) {
        float code = (float)((int32_t)(row[i] >> shift & 15) - 8);
        out[i] = (fresh ? 0.0f : out[i]) + code * scale;
    }
}

static inline void add_row(float *out, const uint8_t *row, int64_t n, int64_t half, int bits,
                           float scale, int fresh) {
    if (bits == 8) {
        add_codes(out, (const int8_t *)row, n, scale, fresh);
    } else {
        add_halves(out, row, lesser(n, half), 0, scale, fresh);
        if (n > half) add_halves(out + half, row, n - half, 4, scale, fresh);
    }
}

/* As lo_sparse_add, for quantised messages; of `limit` elements at the beginning only. */
void lo_quantized_add(const uint8_t *messages, int64_t stride, int64_t world, int64_t numel,
                      int bits, int64_t block, float *out, int64_t limit, float alpha,
                      int overwrite) {
    const int64_t blocks = (numel + block - 1) / block, half = block / 2;
    for (int64_t b = 0; b * block < limit; b++) {
        int64_t n = lesser(block, limit - b * block);
        float *x = out + b * block;
        int fresh = overwrite; /* nothing has been added */
        for (int64_t rank = 0; rank < world; rank++) {
            const uint8_t *message = messages + rank * stride;
            const uint8_t *row = message + HEADER + 4 * blocks + b * block * bits / 8;
            int32_t count;
            float scale;
            memcpy(&count, message, 4);
            if (count == 0) continue;
            memcpy(&scale, message + HEADER + 4 * b, 4);
            if (fresh)
                add_row(x, row, n, half, bits, scale * alpha, 1);
            else
                add_row(x, row, n, half, bits, scale * alpha, 0);
            fresh = 0;
        }
        if (fresh) memset(x, 0, (size_t)n * 4);
    }
}
