// Which kernel quantizes: every question that decides it, and the answer for one matrix and for the rows of many experts
// at the end. csrc/README.md has the kernels in a table.
#pragma once
#include <cstdint>

#include "cuda/job.cuh"
#include "cuda/tile.cuh"
#include "cuda/words.cuh"
#include "quantize.h"

namespace hq {

// ---- what a direction asks for -------------------------------------------------------------------------------------

// Rows of `cols` elements can be stored as whole, aligned segments of 16.
inline bool stores_segments(const Direction& to, int64_t cols) {
  const uintptr_t together = reinterpret_cast<uintptr_t>(to.codes) | reinterpret_cast<uintptr_t>(to.exact);
  return cols % 16 == 0 && together % 16 == 0;
}

// MXFP8, E4M3 or E5M2, with a scale for each row's 32 elements.
inline bool is_mxfp8(const Direction& to) {
  const Spec& spec = to.spec;
  return spec.family == Family::mx && spec.tile_rows == 1 &&
         (spec.element == Element::e4m3 || spec.element == Element::e5m2);
}

// Something else than codes and scales alone.
inline bool wants_other_than_codes(const Direction& to) { return to.exact || !to.codes || !to.scales; }

// What training needs: no uniform grid, no UE5M3 scales, no transform of more than 16, and none nor random bits in MX; no
// NVFP4 with an amax per row, no 4over6 by the fast error, no MS-EDEN, no E2M1 under one scale, MX scales rounded up, no
// transform of scale tiles of several rows, decoded values in bf16. segments: see stores_segments.
inline bool is_usual(const Direction& to, bool segments) {
  const Spec& spec = to.spec;
  const bool known = spec.family != Family::ue5m3 && spec.element != Element::e1m2 && spec.element != Element::int8;
  const bool as_is = known && !spec.eden && spec.rht <= 16 && !(spec.family == Family::mx && (spec.rht || spec.sr));
  return segments && as_is && !(spec.row_scaled && spec.family == Family::nvfp4) && !spec.fast_error &&
         !is_current_four(spec) && spec.scale_rounding == ScaleRounding::up && !(spec.rht && spec.tile_rows > 1) &&
         (!to.exact || to.exact_dtype == Dtype::bf16);
}

// ---- what a job asks for -------------------------------------------------------------------------------------------

inline bool wants_statistics(const QuantizeJob& job) {
  return wants_statistics(job.has_row ? &job.row : nullptr) || wants_statistics(job.has_column ? &job.column : nullptr);
}

inline bool is_mxfp8(const QuantizeJob& job) {
  return (!job.has_row || is_mxfp8(job.row)) && (!job.has_column || is_mxfp8(job.column));
}

// Whether codes have to be decoded: for exact operands, or for a column made from the row's decoded values.
inline bool decodes_codes(const QuantizeJob& job) {
  return (job.has_row && wants_other_than_codes(job.row)) ||
         (job.has_column && (wants_other_than_codes(job.column) || job.dequantized));
}

inline bool has_four_over_six(const QuantizeJob& job) {
  return (job.has_row && job.row.spec.four_over_six != FourOverSix::none) ||
         (job.has_column && job.column.spec.four_over_six != FourOverSix::none);
}

// ---- what a kernel takes -------------------------------------------------------------------------------------------

// The fast encoders: bf16, columns of X in whole blocks of 32, the usual directions. X's rows may end anywhere.
inline bool fast_takes_tiles(const QuantizeJob& job) {
  const Source& x = job.source;
  const bool column_segments = job.has_column && stores_segments(job.column, 16);
  return x.dtype == Dtype::bf16 && job.vector_in && x.cols % 32 == 0 && !job.find_row && !job.find_column &&
         (!job.has_row || is_usual(job.row, job.vector_row)) &&
         (!job.has_column || is_usual(job.column, column_segments));
}

inline bool has_whole_tiles(const Source& x) { return x.rows % kTile == 0 && x.cols % kTile == 0; }

// The fast encoders for one matrix: its tiles fit gridDim.y, statistics come from whole tiles, and exact columns are not
// stored by rows.
inline bool fast_takes_matrix(const QuantizeJob& job) {
  const Source& x = job.source;
  constexpr int64_t most = 1 << 22;
  return fast_takes_tiles(job) && x.rows > 0 && x.cols > 0 && x.rows <= most && x.cols <= most &&
         !job.column.exact_turned && (has_whole_tiles(x) || !wants_statistics(job));
}

// quantize_mx_flat: MXFP8 rows alone, of a matrix without gaps whose rows are whole blocks of 32.
inline bool flat_takes_matrix(const QuantizeJob& job) {
  const Source& x = job.source;
  return !job.has_column && job.has_row && is_mxfp8(job) && is_usual(job.row, job.vector_row) &&
         x.dtype == Dtype::bf16 && job.vector_in && x.row_stride == x.cols && x.cols % 32 == 0 && x.rows > 0 &&
         x.cols > 0 && x.rows < (int64_t{1} << 45) / x.cols && !wants_statistics(job);
}

// find_flat: a matrix without gaps, in either order, as whole units of 16 bytes.
inline bool find_flat_takes(const Source& x) {
  const int64_t bytes = x.rows * x.cols * (x.dtype == Dtype::fp32 ? 4 : 2);
  const bool dense = (x.col_stride == 1 && x.row_stride == x.cols) || (x.row_stride == 1 && x.col_stride == x.rows);
  return dense && bytes % 16 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

// find_transformed: columns of bf16 under the Hadamard transform, in units of 16 rows and 4 columns.
inline bool find_transformed_takes(const QuantizeJob& job) {
  const Source& x = job.source;
  return job.has_column && !job.dequantized && job.column.spec.rht == 16 && !job.column.spec.eden &&
         !job.column.spec.row_scaled &&
         x.dtype == Dtype::bf16 && x.col_stride == 1 && x.row_stride % 4 == 0 && x.row_stride >= x.cols &&
         x.rows % kSegment == 0 && x.cols % 4 == 0 && x.rows > 0 && x.cols > 0 && x.rows < (int64_t{1} << 36) / x.cols &&
         reinterpret_cast<uintptr_t>(x.data) % 8 == 0;
}

// find_members: rows that follow each other without gaps, each of whole units of 16 bytes.
inline bool find_members_takes(const QuantizeJob& job) {
  const Source& x = job.source;
  const int64_t row_bytes = x.cols * (x.dtype == Dtype::fp32 ? 4 : 2);
  return job.vector_in && x.row_stride == x.cols && row_bytes % 16 == 0;
}

// The rows of all experts quantize as those of one matrix: no scale depends on where an expert begins.
inline bool group_is_one_matrix(const Call& call) {
  if (call.column || !call.row || wants_statistics(call.row)) return false;
  const Spec& spec = call.row->spec;
  return !spec.sr && (spec.family == Family::mx || spec.family == Family::block) && spec.tile_rows == 1;
}

// The row's amax serves the column, too: both are X's own, and the row's has been found in this call.
inline bool column_shares_amax(const QuantizeJob& job) {
  const Direction& row = job.row;
  return job.has_row && !job.dequantized && has_global_amax(row.spec) && amax_is_of_x(row.spec) &&
         amax_is_of_x(job.column.spec) && row.amax == row.found;
}

// X's own amax and the amax of its transformed columns are both to be found.
inline bool finds_both_amaxes(const QuantizeJob& job) {
  const Direction& row = job.row;
  return job.has_row && !row.amax && has_global_amax(row.spec) && amax_is_of_x(row.spec) && !job.column.amax &&
         has_global_amax(job.column.spec) && find_transformed_takes(job);
}

// ---- the choice ----------------------------------------------------------------------------------------------------

// general: quantize_tiles. fast: quantize_fast. four_over_six: quantize_four_over_six. mx, mx_exact: quantize_mx for codes, or for anything decoded.
// For a group, all of them as quantize_members. mx_flat: quantize_mx_flat.
enum class Encoder { general, fast, four_over_six, mx, mx_exact, mx_flat };

inline Encoder encoder_of_tiles(const QuantizeJob& job) {
  if (has_four_over_six(job)) return wants_statistics(job) ? Encoder::general : Encoder::four_over_six;
  if (wants_statistics(job) || !is_mxfp8(job)) return Encoder::fast;
  return decodes_codes(job) ? Encoder::mx_exact : Encoder::mx;
}

inline Encoder encoder_of_matrix(const QuantizeJob& job) {
  if (flat_takes_matrix(job)) return Encoder::mx_flat;
  return fast_takes_matrix(job) ? encoder_of_tiles(job) : Encoder::general;
}

inline Encoder encoder_of_group(const QuantizeJob& job) {
  const bool fast = fast_takes_tiles(job) && !wants_statistics(job) && !has_four_over_six(job);
  return fast ? encoder_of_tiles(job) : Encoder::general;
}

// Amaxes of the rows and of the columns are both to be found.
inline bool finds_lines(const QuantizeJob& job) {
  return job.has_row && job.has_column && !job.dequantized && job.row.spec.row_scaled && job.column.spec.row_scaled &&
         !job.row.amax && !job.column.amax;
}

// The fast encoders' first tile stores the scale of current scaling, where all tiles of a matrix are whole.
inline bool encoder_stores_scale_inv(const QuantizeJob& job) {
  const bool by_rows = (job.has_row && job.row.spec.row_scaled) || (job.has_column && job.column.spec.row_scaled);
  return !by_rows && fast_takes_matrix(job) && has_whole_tiles(job.source) && !has_four_over_six(job);
}

// ---- inside of the fast encoders, for each tile --------------------------------------------------------------------

__device__ __forceinline__ bool has_tall_scale_tiles(const Direction& to) { return to.spec.tile_rows > 1; }
__device__ __forceinline__ bool is_nvfp4(const Direction& to) { return to.spec.family == Family::nvfp4; }
// The only output of the columns is stored by rows of X.
__device__ __forceinline__ bool is_only_turned(const Direction& to) { return to.exact && to.exact_turned && !to.codes; }

// All rows and columns of the tile are the matrix's. Its rows are lines of the columnwise operand, which are aligned or not.
__device__ __forceinline__ bool is_whole_tile(const QuantizeJob& job, const FastCorner& at) {
  const bool aligned = !job.has_column || at.rows % kSegment == 0 || is_only_turned(job.column);
  return aligned && at.r0 + kTile <= at.rows && at.c0 + kTile <= at.end;
}

}  // namespace hq
