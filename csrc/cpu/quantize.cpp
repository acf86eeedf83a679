// CPU loops of quantization. X is cut into tiles of 128 x 128, which hold whole scale tiles; one read of a tile serves
// both directions, the column's after a transposition. A tile goes through stages, each a plain loop over contiguous
// fp32 that the compiler vectorizes: load (tile.h), amax per block and scale per scale tile (scales.h), encode, decode,
// sum and write (encode.h). Compiled once per instruction set into namespace HQ_ISA, and therefore without templates or
// inline functions of the standard library: the linker would merge the copies.
#include "quantize.h"

#include "cpu/encode.h"
#include "cpu/fast.h"
#include "numerics.h"
#include "cpu/scales.h"
#include "cpu/tile.h"

namespace hq {
namespace HQ_ISA {
namespace {

float max_of(Element element) {
  switch (element) {
    case Element::e4m3: return 448.0f;
    case Element::e5m2: return 57344.0f;
    case Element::e2m1: return 6.0f;
    case Element::e2m3: return 7.5f;
    case Element::e3m2: return 28.0f;
    case Element::e1m2: return 3.5f;
    case Element::int8: return 127.0f;
  }
  return 0.0f;
}

float max_of(Dtype dtype) {
  if (dtype == Dtype::fp32) return kFloatMax;
  return dtype == Dtype::bf16 ? 0x1.FEp127f : 65504.0f;
}

// A call as the loops take it: where X's columns are its contiguous axis, X is its transpose and the directions have
// changed places.
struct Arranged {
  Call call;
  Source source;
  const Direction *row, *column;
};

// find: only amaxes are wanted, and the one scale of current scaling is not known yet.
Work work_of(const Source& source, const Direction& to, bool columns, bool find) {
  const int whole = is_current_four(to.spec) ? 16 : kWidth;  // random bits come by 16
  const int block = to.spec.tile_cols ? to.spec.tile_cols : whole;
  Work work{to, columns ? source.cols : source.rows, columns ? source.rows : source.cols, block, max_of(to.spec.element),
            max_of(source.dtype), 1.0f, to.amax ? to.amax : to.found, {}};
  signs_of(to.spec, to.key, work.signs);
  if (to.spec.family == Family::current && !to.spec.row_scaled && work.amax && !find)
    work.whole_scale = current_scale(work, 0);
  return work;
}

// The tile of an operand that covers X's tile.
void place(const Work& work, int64_t row0, int64_t col0, Tile& tile) {
  tile.row0 = row0, tile.col0 = col0;
  tile.rows = at_most(work.rows - row0, kWidth);
  tile.cols = at_most(work.cols - col0, kWidth);
  tile.blocks = (tile.cols + work.block - 1) / work.block;
}

// found = max(found, amax) of a tile, one thread at a time.
void find_in_tile(const Work& work, const Tile& tile) {
  int32_t rows[kWidth], most = 0;
  for (int r = 0; r < tile.rows; ++r) {
    rows[r] = amax_of(tile.x + r * kWidth, tile.cols);
    most = rows[r] > most ? rows[r] : most;
  }
  if (work.to.seen && most == static_cast<int32_t>(kInfBits)) __atomic_store_n(work.to.seen + 2, 1, __ATOMIC_RELAXED);
#pragma omp critical(hq_find)
  {
    float* found = work.to.found;
    if (!work.to.spec.row_scaled) {
      if (to_float(static_cast<uint32_t>(most)) > *found) *found = to_float(static_cast<uint32_t>(most));
    } else {
      for (int r = 0; r < tile.rows; ++r) {
        const float amax = to_float(static_cast<uint32_t>(rows[r]));
        if (amax > found[tile.row0 + r]) found[tile.row0 + r] = amax;
      }
    }
  }
}

struct Pass {
  const Source& source;
  const Work *row, *column;    // null: not in this pass
  bool find_row, find_column;  // only their amaxes
  bool dequantized;
};

// Rows of the bands that a tile is cut into: 32, which the L1 cache holds, or as many as the longest block has. 0: a
// direction that is not fast wants the tile.
int fast_lines(const Pass& pass) {
  if (pass.find_row || pass.find_column || pass.dequantized) return 0;
  const Work* const works[] = {pass.row, pass.column};
  int lines = 32;
  for (const Work* work : works) {
    if (!work) continue;
    if (!fast_takes(work->to)) return 0;
    if (work->block == kWidth) lines = kWidth;
  }
  return lines;
}

// What is not finite among `count` values, which a direction encodes, or two.
void note_seen(const float* x, int count, const Direction* first, const Direction* second) {
  const bool wanted = (first && first->seen) || (second && second->seen);
  if (!wanted) return;
  int32_t most = 0;
  for (int i = 0; i < count; ++i) {
    const int32_t magnitude = static_cast<int32_t>(to_bits(x[i]) & kAbsMask);
    most = magnitude > most ? magnitude : most;
  }
  if (most < static_cast<int32_t>(kInfBits)) return;
  bool inf = false;
  for (int i = 0; i < count; ++i) inf = inf || (to_bits(x[i]) & kAbsMask) == kInfBits;
  const Direction* const directions[] = {first, second};
  for (const Direction* to : directions) {
    if (!to || !to->seen) continue;
    if (most > static_cast<int32_t>(kInfBits)) __atomic_store_n(to->seen, 1, __ATOMIC_RELAXED);
    if (inf) __atomic_store_n(to->seen + 1, 1, __ATOMIC_RELAXED);
  }
}

void run_fast_tile(const Pass& pass, int lines, Tile& x, Tile& turned) {
  const int64_t row0 = x.row0, col0 = x.col0;
  const int rows = x.rows;
  Columns columns;
  if (pass.row) place(*pass.row, row0, col0, x);
  if (pass.column) place(*pass.column, col0, row0, turned);
  for (int first = 0; first < rows; first += lines) {
    load_lines(pass.source, x, first, lines, x.x);
    note_seen(x.x, lines * kWidth, pass.row ? &pass.row->to : nullptr, pass.column ? &pass.column->to : nullptr);
    if (pass.row)
      with_format(*pass.row, [&](auto as) {
        using As = decltype(as);
        fast_rows<typename As::Element, As::kBlock>(*pass.row, x, x.x, first, lines);
      });
    if (pass.column)
      with_format(*pass.column, [&](auto as) {
        using As = decltype(as);
        fast_columns<typename As::Element, As::kBlock>(*pass.column, turned, x.x, first, lines, columns);
      });
  }
  if (pass.column)
    with_format(*pass.column, [&](auto as) {
      using As = decltype(as);
      write_columns<typename As::Element, As::kBlock>(*pass.column, turned, columns);
    });
}

// One direction of a tile that holds the operand's elements. dtype: see quantize_tile_as.
void run_direction(const Work& work, Tile& tile, int64_t index, bool find, const Dtype* dtype) {
  if (find) return find_in_tile(work, tile);
  note_seen(tile.x, tile.rows * kWidth, &work.to, nullptr);
  with_format(work, [&](auto as) {
    using As = decltype(as);
    quantize_tile_as<typename As::Element, As::kBlock>(work, tile, index, dtype);
  });
}

// X's tile in `x`; `turned` is scratch of the same size and becomes the column's tile.
void run_tile(const Pass& pass, int64_t index, Tile& x, Tile& turned) {
  load(pass.source, turned.x, x);
  const int64_t row0 = x.row0, col0 = x.col0;
  if (pass.row) {
    const bool keep = pass.row->to.spec.rht && pass.column && !pass.dequantized;
    Tile& tile = keep ? turned : x;
    if (keep) memcpy(turned.x, x.x, sizeof(x.x));
    place(*pass.row, row0, col0, tile);
    transform(*pass.row, false, tile.x);
    run_direction(*pass.row, tile, index, pass.find_row,
                  pass.column && pass.dequantized ? &pass.source.dtype : nullptr);
  }
  if (!pass.column) return;
  transform(*pass.column, true, x.x);
  transpose(x.x, turned.x);
  place(*pass.column, col0, row0, turned);
  run_direction(*pass.column, turned, index, pass.find_column, nullptr);
}

// What one pass makes of one matrix, or of one expert's rows; null directions are not in it. first: tiles of the parts
// before.
struct Part {
  Source source;
  const Direction *row, *column;
  bool find_row, find_column, dequantized;
  int64_t first;
};

int64_t tiles_of(const Source& x) { return (x.rows + kWidth - 1) / kWidth * ((x.cols + kWidth - 1) / kWidth); }

// The tiles of all parts, spread over the threads.
void run(const Part* parts, int64_t count, int threads) {
  const int64_t tiles = parts[count - 1].first + tiles_of(parts[count - 1].source);
#pragma omp parallel num_threads(threads)
  {
    Tile x, turned;
    int64_t p = 0;
#pragma omp for schedule(static)
    for (int64_t index = 0; index < tiles; ++index) {
      while (p + 1 < count && parts[p + 1].first <= index) ++p;
      const Part& part = parts[p];
      if (!part.row && !part.column) continue;
      const Direction& any = part.row ? *part.row : *part.column;
      const Work row = work_of(part.source, part.row ? *part.row : any, false, part.find_row);
      const Work column = work_of(part.source, part.column ? *part.column : any, true, part.find_column);
      const Pass pass{part.source, part.row ? &row : nullptr, part.column ? &column : nullptr, part.find_row,
                      part.find_column, part.dequantized};
      locate(part.source, index - part.first, x);
      const int lines = fast_lines(pass);
      if (lines)
        run_fast_tile(pass, lines, x, turned);
      else
        run_tile(pass, index - part.first, x, turned);
    }
  }
}

// note: whether `seen` of the direction is told.
void find(const Arranged& arranged, bool column, int threads, bool note) {
  Direction to = column ? *arranged.column : *arranged.row;
  if (!note) to.seen = nullptr;
  const bool from_row = column && arranged.call.dequantized;
  if (!from_row && amax_is_of_x(to.spec)) {
    const float amax = scan_whole(arranged.source, threads);
    if (amax > *to.found) *to.found = amax;
    if (to.seen && amax > kFloatMax) to.seen[2] = 1;
    return;
  }
  Direction silent = arranged.row ? *arranged.row : *arranged.column;  // encoded for its decoded values only
  silent.codes = nullptr, silent.scales = nullptr, silent.global = nullptr, silent.exact = nullptr;
  silent.sums = nullptr, silent.row_errors = nullptr, silent.seen = nullptr;
  const Direction* first = column ? (from_row ? &silent : nullptr) : &to;
  const Part part{arranged.source, first, column ? &to : nullptr, !column, column, from_row, 0};
  run(&part, 1, threads);
}

// A global amax that is not given is found in `found`, which then counts as given.
void prepare(const Arranged& arranged, bool column, int threads, Direction& to) {
  if (!has_global_amax(to.spec)) return;
  const int64_t entries = to.spec.row_scaled ? (column ? arranged.source.cols : arranged.source.rows) : 1;
  if (entries == 0) return;  // then there is no element either, and addresses may be null
  if (!to.amax) {
    const bool same = column && arranged.row && !arranged.call.dequantized && has_global_amax(arranged.row->spec) &&
                      amax_is_of_x(arranged.row->spec) && amax_is_of_x(to.spec) && arranged.row->found &&
                      arranged.row->amax == arranged.row->found;
    if (same) {
      *to.found = *arranged.row->amax;
    } else {
      memset(to.found, 0, sizeof(float) * static_cast<size_t>(entries));
      find(arranged, column, threads, false);
    }
    to.amax = to.found;
  }
  if (to.global && to.global != to.amax) memcpy(to.global, to.amax, sizeof(float) * static_cast<size_t>(entries));
  if (to.spec.family != Family::current || !to.scales) return;
  const Work work = work_of(arranged.source, to, column, false);
  for (int64_t i = 0; i < entries; ++i) static_cast<float*>(to.scales)[i] = 1.0f / current_scale(work, i);
}

Arranged arrange(const Call& call) {
  Arranged arranged{call, call.source, call.row, call.column};
  const bool sums = wants_statistics(call.row) || wants_statistics(call.column);
  if (rows_contiguous(call.source) && !call.dequantized && !sums) {
    const Source& x = call.source;
    arranged.source = {x.data, x.dtype, x.cols, x.rows, x.col_stride, x.row_stride};
    arranged.row = call.column, arranged.column = call.row;
  }
  return arranged;
}

// A call whose global amaxes are found: its directions are copies that have them.
struct Prepared {
  Arranged arranged;
  Direction row, column;
};

Part part_of(const Call& call, int threads, Prepared& to) {
  Arranged& arranged = to.arranged = arrange(call);
  if (arranged.row) {
    to.row = *arranged.row;
    prepare(arranged, false, threads, to.row);
    arranged.row = &to.row;
  }
  if (arranged.column) {
    to.column = *arranged.column;
    prepare(arranged, true, threads, to.column);
    arranged.column = &to.column;
  }
  return {arranged.source, arranged.row, arranged.column, false, false, call.dequantized, 0};
}

}  // namespace

// The calls of a group, or one.
void quantize(const Call* calls, int64_t count, int threads) {
  if (count == 0) return;
  Prepared* prepared = new Prepared[static_cast<size_t>(count)];
  Part* parts = new Part[static_cast<size_t>(count)];
  int64_t tiles = 0;
  for (int64_t i = 0; i < count; ++i) {
    parts[i] = part_of(calls[i], threads, prepared[i]);
    parts[i].first = tiles;
    tiles += tiles_of(parts[i].source);
  }
  run(parts, count, threads);
  delete[] parts;
  delete[] prepared;
}

void find_amax(const Call& call, int threads) {
  const Arranged arranged = arrange(call);
  if (arranged.row && arranged.row->found && arranged.row->amax != arranged.row->found) find(arranged, false, threads, true);
  if (arranged.column && arranged.column->found) find(arranged, true, threads, true);
}

}  // namespace HQ_ISA
}  // namespace hq
