// Q-Filters ranking value of every row: sign * <filter, key> in float32, then the selection rule's special cases.
// One simdgroup (32 lanes) per row; grid (ceil(n / rows per threadgroup) * threads, B * H, 1).
//
// Order of the sum, a function of D alone: lane l adds d = l, l + 32, l + 64, ... in turn, starting from zero; the 32
// partial sums then meet in a halving tree (16, 8, 4, 2, 1). simd_sum is not used because its order is unspecified, and
// products are not contracted into fused multiply-adds, so that a CPU oracle can reproduce every bit.
//
// Inputs: keys [B,H,n,D], values [B,H,n,Dv], filters float [B,H,D], positions int [B,H,n], offset int [B],
//         settings int [3] = n_sink, recent, sign.          Output: ranks float [B,H,n].
#pragma clang fp contract(off)
constexpr uint LANES = 32;
constexpr uint EXPONENT = 0x7f800000u;  // all exponent bits set: infinity or NaN (bit tests survive fast-math)

const uint n = uint(keys_shape[2]);
const uint row = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
if (row >= n) {
    return;  // the same for every lane, so no lane is missing from the shuffles below
}
const uint D = uint(keys_shape[3]);
const uint Dv = uint(values_shape[3]);
const uint lane = thread_index_in_simdgroup;
const uint head = threadgroup_position_in_grid.y;  // b * H + h
const uint batch = head / uint(keys_shape[1]);
const ulong cell = ulong(head) * n + row;

float sum = 0.0f;  // a key that is not finite makes the sum so; only values need a look of their own
for (uint d = lane; d < D; d += LANES) {
    sum += float(keys[cell * D + d]) * filters[ulong(head) * D + d];
}
bool finite = true;
for (uint d = lane; d < Dv; d += LANES) {
    finite = finite && (as_type<uint>(float(values[cell * Dv + d])) & EXPONENT) != EXPONENT;
}
const bool poisoned = simd_any(!finite);
for (ushort step = 16; step > 0; step /= 2) {
    sum += simd_shuffle_xor(sum, step);
}

if (lane == 0) {
    const int position = positions[cell];
    const int n_sink = settings[0];
    const int recent = settings[1];
    const float score = float(settings[2]) * sum + 0.0f;  // + 0.0f turns -0.0 into +0.0
    const bool guarded = position < n_sink || (recent > 0 && position >= offset[batch] - recent);
    const bool loses = poisoned || (as_type<uint>(score) & EXPONENT) == EXPONENT;
    if (position < 0) {
        ranks[cell] = -INFINITY;  // padding: last by its position, whatever it holds
    } else if (guarded) {
        ranks[cell] = INFINITY;
    } else {
        ranks[cell] = loses ? -INFINITY : score;
    }
}
