// How a pass over a tensor is cut into slabs and spread over threads.
//
// A pass has two steps, and per channel a decision before and between them:
//   Start    around which value to sum (only if there is anything to sum);
//   Reduce   Pass::kSums sums per channel, from all of its values;
//   Finish   what the sums mean, once per channel: statistics, gradients, the terms for Apply;
//   Apply    one output per value, or several.
// The pieces that sums are made of, and the order in which they are added, depend on the shape
// alone: every number of threads gives the same bits.
#ifndef MXBN_OPERATOR_BATCH_NORM_CPU_SCHEDULE_H_
#define MXBN_OPERATOR_BATCH_NORM_CPU_SCHEDULE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batch_norm_cpu_kernels.h"
#include "parallel.h"

namespace mxbn {

constexpr int64_t kPieceValues = 1 << 16;  // about so many values are summed in one piece
constexpr int64_t kShortRow = 16;      // rows below this are not worth a vector loop of their own
constexpr int64_t kTileColumns = 512;  // whose sums stay in the first-level cache
constexpr int64_t kMaxBlock = 16;      // channels that oneDNN keeps together
constexpr int64_t kMinRows = 128;      // of a block, so that its sums are few beside its values

// Channels whose rows (inner values) are long: a slab belongs to one channel, or, in the blocked
// layout, to a block of channels that are its columns.
template <typename Pass>
class RowSchedule {
 public:
  RowSchedule(const View& view, Pass* pass)
      : view_(view),
        pass_(pass),
        layout_(view.block == 1 ? kOneChannel : kColumns),
        groups_(view.channels / view.block),
        piece_rows_(view.block == 1
                        ? std::min(view.outer, std::max<int64_t>(1, kPieceValues / view.inner))
                        : 1),
        piece_cols_(std::min(view.inner, kPieceValues / view.block)),
        across_(CeilDiv(view.inner, piece_cols_)),
        pieces_(CeilDiv(view.outer, piece_rows_) * across_),
        crew_(view.Size()) {}

  void Run() {
    // Group by group, a group's values are still in cache when Apply comes to them.
    const bool by_group =
        pass_->reduces() &&
        (crew_.threads() == 1 || groups_ % crew_.threads() == 0 || groups_ >= 4 * crew_.threads());
    if (!by_group) {
      ReduceAll();
      if (pass_->applies()) ApplyAll();
      return;
    }
    crew_.Do(groups_, [this](int64_t group) {
      Start(group);
      Sums sums;
      for (int64_t p = 0; p < pieces_; ++p) sums.Add(ReducePiece(group, p));
      Finish(group, sums);
      if (!pass_->applies()) return;
      // Backwards: of a group larger than the cache, the last pieces are still there.
      for (int64_t p = pieces_ - 1; p >= 0; --p) Apply(group, At(group, p));
    });
  }

 private:
  struct Piece {
    int64_t offset;
    Slab slab;
  };

  // The sums of each channel of a group.
  struct Sums {
    double values[Pass::kSums * kMaxBlock] = {};
    void Add(const Sums& other) {
      for (int i = 0; i < Pass::kSums * kMaxBlock; ++i) values[i] += other.values[i];
    }
  };

  // Piece p of a group: some of the rows, or a part of one row.
  Piece At(int64_t group, int64_t p) const {
    const int64_t row = p / across_ * piece_rows_, col = p % across_ * piece_cols_;
    const int64_t rows = std::min(piece_rows_, view_.outer - row);
    return {view_.Index(row, group * view_.block, col), SlabOf(rows, col)};
  }

  Slab SlabOf(int64_t rows, int64_t col) const {
    const int64_t cols = std::min(piece_cols_, view_.inner - col);
    if (layout_ == kColumns) return {cols, view_.block, view_.block};
    return {rows, cols, view_.channels * view_.inner};
  }

  void Start(int64_t group) {
    for (int64_t c = group * view_.block; c < (group + 1) * view_.block; ++c) pass_->Start(c);
  }

  Sums ReducePiece(int64_t group, int64_t p) const {
    Sums sums;
    const Piece piece = At(group, p);
    pass_->Reduce(layout_, piece.slab, piece.offset, pass_->centre() + group * view_.block,
                  sums.values, kMaxBlock);
    return sums;
  }

  void Finish(int64_t group, const Sums& sums) {
    for (int64_t i = 0; i < view_.block; ++i) {
      double all[Pass::kSums];
      for (int k = 0; k < Pass::kSums; ++k) all[k] = sums.values[k * kMaxBlock + i];
      pass_->Finish(group * view_.block + i, all);
    }
  }

  void Apply(int64_t group, const Piece& piece) const {
    pass_->Apply(layout_, piece.slab, piece.offset, pass_->terms() + group * view_.block,
                 view_.channels);
  }

  void ReduceAll() {
    if (!pass_->reduces()) {
      for (int64_t c = 0; c < view_.channels; ++c) pass_->Finish(c, nullptr);
      return;
    }
    for (int64_t group = 0; group < groups_; ++group) Start(group);
    std::vector<Sums> parts(static_cast<size_t>(groups_ * pieces_));
    crew_.Do(groups_ * pieces_,
             [&](int64_t i) { parts[i] = ReducePiece(i / pieces_, i % pieces_); });
    for (int64_t group = 0; group < groups_; ++group) {
      Sums sums;
      for (int64_t p = 0; p < pieces_; ++p) sums.Add(parts[group * pieces_ + p]);
      Finish(group, sums);
    }
  }

  // In the order of memory: some groups of a row, or a part of one, at a time.
  void ApplyAll() const {
    const int64_t at_once = std::max<int64_t>(1, kPieceValues / (view_.inner * view_.block));
    const int64_t parts = CeilDiv(groups_, at_once) * across_;
    crew_.Do(view_.outer * parts, [&](int64_t i) {
      const int64_t row = i / parts, col = i % across_ * piece_cols_;
      const int64_t first = i % parts / across_ * at_once;
      const Slab slab = SlabOf(1, col);
      for (int64_t group = first; group < std::min(first + at_once, groups_); ++group) {
        Apply(group, {view_.Index(row, group * view_.block, col), slab});
      }
    });
  }

  const View view_;
  Pass* const pass_;
  const Layout layout_;
  const int64_t groups_;  // of channels, of view.block each
  const int64_t piece_rows_, piece_cols_;
  const int64_t across_;  // pieces of one row
  const int64_t pieces_;  // pieces of one group
  const Crew crew_;
};

// Channels whose rows are short (channels-last: one value): the tensor is a matrix whose columns
// have parameters of their own. A period of channels x inner columns is repeated where it is
// narrow, so that vectors are full; the last row may then be shorter.
template <typename Pass>
class ColumnSchedule {
 public:
  ColumnSchedule(const View& view, Pass* pass)
      : view_(view),
        pass_(pass),
        width_(Width(view)),
        rows_(view.Size() / width_),
        rest_(view.Size() % width_),
        block_rows_(std::max(kMinRows, kPieceValues / width_)),
        blocks_(CeilDiv(rows_, block_rows_) + (rest_ > 0)),
        tiles_(CeilDiv(width_, kTileColumns)),
        crew_(view.Size()) {}

  void Run() {
    if (pass_->reduces()) {
      ReduceAll();
    } else {
      for (int64_t c = 0; c < view_.channels; ++c) pass_->Finish(c, nullptr);
    }
    if (pass_->applies()) ApplyAll();
  }

 private:
  static int64_t Width(const View& view) {
    const int64_t period = view.channels * view.inner;
    int64_t repeats = 1;
    while (repeats * period < 64 || repeats * period % 16 != 0) {
      if (period >= 256 || 2 * repeats > view.outer) break;
      repeats *= 2;
    }
    return repeats * period;
  }

  // Gives every column the value of its channel.
  template <typename V>
  void Spread(const V* by_channel, V* by_column) const {
    for (int64_t col = 0; col < width_;) {
      for (int64_t c = 0; c < view_.channels; ++c) {
        for (int64_t i = 0; i < view_.inner; ++i) by_column[col++] = by_channel[c];
      }
    }
  }

  // Calls f(block, slab, offset, first column) for every block of rows and tile of columns.
  template <typename F>
  void ForEachSlab(F f) const {
    crew_.Do(blocks_ * tiles_, [&](int64_t i) {
      const int64_t block = i / tiles_, col = i % tiles_ * kTileColumns;
      const int64_t row = std::min(block * block_rows_, rows_);
      const bool last_row = row == rows_;  // the shorter one
      const int64_t cols = std::min(kTileColumns, (last_row ? rest_ : width_) - col);
      const int64_t rows = last_row ? 1 : std::min(block_rows_, rows_ - row);
      if (cols > 0) f(block, Slab{rows, cols, width_}, row * width_ + col, col);
    });
  }

  void ReduceAll() {
    crew_.Do(view_.channels, [this](int64_t c) { pass_->Start(c); });
    std::vector<double> centres(static_cast<size_t>(width_));
    Spread(pass_->centre(), centres.data());
    // By block, then the sum, then the column.
    const int64_t block_sums = Pass::kSums * width_;
    std::vector<double> parts(static_cast<size_t>(blocks_ * block_sums));
    ForEachSlab([&](int64_t block, const Slab& slab, int64_t offset, int64_t col) {
      pass_->Reduce(kColumns, slab, offset, &centres[col], &parts[block * block_sums + col],
                    width_);
    });
    // Over the blocks first, into those of the first one, in the order of memory; then over the
    // columns of a channel.
    crew_.Do(CeilDiv(block_sums, kTileColumns), [&](int64_t tile) {
      const int64_t end = std::min((tile + 1) * kTileColumns, block_sums);
      for (int64_t block = 1; block < blocks_; ++block) {
        const double* part = &parts[block * block_sums];
        for (int64_t i = tile * kTileColumns; i < end; ++i) parts[i] += part[i];
      }
    });
    const int64_t period = view_.channels * view_.inner;
    crew_.Do(view_.channels, [&](int64_t c) {
      double sums[Pass::kSums] = {};
      for (int64_t start = c * view_.inner; start < width_; start += period) {
        for (int64_t col = start; col < start + view_.inner; ++col) {
          for (int k = 0; k < Pass::kSums; ++k) sums[k] += parts[k * width_ + col];
        }
      }
      pass_->Finish(c, sums);
    });
  }

  void ApplyAll() const {
    using C = typename Pass::C;
    std::vector<C> terms(static_cast<size_t>(Pass::kTerms * width_));
    for (int64_t term = 0; term < Pass::kTerms; ++term) {
      Spread(pass_->terms() + term * view_.channels, &terms[term * width_]);
    }
    ForEachSlab([&](int64_t, const Slab& slab, int64_t offset, int64_t col) {
      pass_->Apply(kColumns, slab, offset, &terms[col], width_);
    });
  }

  const View view_;
  Pass* const pass_;
  const int64_t width_;
  const int64_t rows_, rest_;  // whole rows, and the values of the shorter one
  const int64_t block_rows_, blocks_, tiles_;
  const Crew crew_;
};

template <typename Pass>
void Run(View view, Pass* pass) {
  if (view.Size() == 0) {
    for (int64_t c = 0; c < view.channels; ++c) pass->Finish(c, nullptr);
    return;
  }
  if (view.channels == 1) view = View{1, 1, view.Size(), 1};
  if (view.block > 1 || view.inner >= kShortRow) {
    RowSchedule<Pass>(view, pass).Run();
  } else {
    ColumnSchedule<Pass>(view, pass).Run();
  }
}

}  // namespace mxbn

#endif  // MXBN_OPERATOR_BATCH_NORM_CPU_SCHEDULE_H_
