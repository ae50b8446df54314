// Keeps `keep` of n rows per head, in row order, and copies what they hold bit for bit. One threadgroup (TG threads) per
// (b,h); grid (TG, B * H, 1). Rows stand in temporal order, so that "lowest position first" is "lowest row first".
//
// A real row (position >= 0) survives if its rank is above the head's threshold, or equal to it while the head's quota
// of ties lasts. Padding rows fill what real rows leave, after them. The rows are scanned in chunks of TG, so neither
// n nor keep is bounded: a row's slot is the number of survivors before it, counted over simdgroups and chunks.
//
// Inputs: keys [B,H,n,D], values [B,H,n,Dv], scores float, ranks float, positions int [B,H,n];
//         threshold float, tie_quota int, padding_quota int [B,H]; keep int [].
// Outputs: kept_keys [B,H,keep,D], kept_values [B,H,keep,Dv], kept_scores float, kept_positions int [B,H,keep].
constexpr uint LANES = 32;
constexpr uint GROUPS = TG / LANES;
constexpr uint EVICTED = 0xffffffffu;
threadgroup uint above_counts[GROUPS];
threadgroup uint tied_counts[GROUPS];
threadgroup uint padding_counts[GROUPS];

const uint n = uint(keys_shape[2]);
const uint D = uint(keys_shape[3]);
const uint Dv = uint(values_shape[3]);
const uint head = threadgroup_position_in_grid.y;  // b * H + h
const uint lane = thread_index_in_simdgroup;
const uint group = simdgroup_index_in_threadgroup;
const ulong in_first = ulong(head) * n;
const ulong out_first = ulong(head) * uint(keep);
const float cut = threshold[head];
const uint tie_limit = uint(tie_quota[head]);
const uint padding_limit = uint(padding_quota[head]);
const uint real_kept = uint(keep) - padding_limit;

uint above_before = 0;  // rows of each kind in the chunks already passed
uint tied_before = 0;
uint padding_before = 0;
for (uint base = 0; base < n; base += TG) {
    const uint row = base + thread_index_in_threadgroup;
    bool above = false;
    bool tied = false;
    bool padding = false;
    if (row < n) {
        padding = positions[in_first + row] < 0;
        above = !padding && ranks[in_first + row] > cut;
        tied = !padding && ranks[in_first + row] == cut;
    }
    uint above_rows = simd_prefix_exclusive_sum(uint(above));  // rows of each kind before this one
    uint tied_rows = simd_prefix_exclusive_sum(uint(tied));
    uint padding_rows = simd_prefix_exclusive_sum(uint(padding));
    if (lane == LANES - 1) {
        above_counts[group] = above_rows + uint(above);
        tied_counts[group] = tied_rows + uint(tied);
        padding_counts[group] = padding_rows + uint(padding);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    above_rows += above_before;
    tied_rows += tied_before;
    padding_rows += padding_before;
    for (uint other = 0; other < GROUPS; ++other) {
        if (other < group) {
            above_rows += above_counts[other];
            tied_rows += tied_counts[other];
            padding_rows += padding_counts[other];
        }
        above_before += above_counts[other];
        tied_before += tied_counts[other];
        padding_before += padding_counts[other];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // counts are read: the next chunk may overwrite them

    uint slot = EVICTED;
    if (above || (tied && tied_rows < tie_limit)) {
        slot = above_rows + min(tied_rows, tie_limit);
    } else if (padding && padding_rows < padding_limit) {
        slot = real_kept + padding_rows;
    }
    if (slot != EVICTED) {
        kept_scores[out_first + slot] = scores[in_first + row];
        kept_positions[out_first + slot] = positions[in_first + row];
    }
    // Each simdgroup copies the survivors among its own 32 rows, one row at a time with all lanes.
    for (ushort source = 0; source < LANES; ++source) {
        const uint target = simd_shuffle(slot, source);
        if (target != EVICTED) {
            const ulong from = in_first + base + group * LANES + source;
            const ulong to = out_first + target;
            for (uint d = lane; d < D; d += LANES) {
                kept_keys[to * D + d] = keys[from * D + d];
            }
            for (uint d = lane; d < Dv; d += LANES) {
                kept_values[to * Dv + d] = values[from * Dv + d];
            }
        }
    }
}
