#include "shadow.h"

namespace simulated {

// Makes `at` a border between cells, if a cell spans it.
void Shadow::split(size_t at) {
  auto next = cells_.upper_bound(at);
  if (next == cells_.begin()) return;
  auto cell = std::prev(next);
  if (cell->first == at || cell->second.end <= at) return;
  Cell right = cell->second;
  cell->second.end = at;
  cells_.emplace_hint(next, at, std::move(right));
}

// Makes cells cover [begin, end) exactly.
void Shadow::cover(size_t begin, size_t end) {
  split(begin);
  split(end);
  auto cell = cells_.lower_bound(begin);
  for (size_t at = begin; at < end;) {
    if (cell == cells_.end() || cell->first > at) {
      size_t until = cell == cells_.end() ? end : std::min(end, cell->first);
      Cell gap;
      gap.end = until;
      cell = cells_.emplace_hint(cell, at, std::move(gap));
    }
    at = cell->second.end;
    ++cell;
  }
}

void Shadow::remember_read(Cell& cell, const Stamp& now) {
  for (auto& read : cell.reads)
    if (read.lane == now.lane) {
      read = now;
      return;
    }
  cell.reads.push_back(now);
}

void Shadow::touch(
    size_t begin, size_t end, bool writes, const Stamp& now, const Clock& known,
    const OnConflict& on_conflict) {
  if (begin >= end) return;
  cover(begin, end);
  auto first = cells_.lower_bound(begin);
  for (auto cell = first; cell != cells_.end() && cell->first < end; ++cell) {
    const Stamp& write = cell->second.write;
    if (cell->second.written && !known.knows(write.lane, write.tick))
      on_conflict(
          writes ? HazardKind::WriteAfterWrite : HazardKind::ReadAfterWrite, write, cell->first,
          cell->second.end);
    if (!writes) {
      remember_read(cell->second, now);
      continue;
    }
    for (const Stamp& read : cell->second.reads)
      if (!known.knows(read.lane, read.tick))
        on_conflict(HazardKind::WriteAfterRead, read, cell->first, cell->second.end);
  }
  if (writes) {  // one cell for all of it, so that memory used in pieces does not stay in pieces
    cells_.erase(first, cells_.lower_bound(end));
    Cell whole;
    whole.end = end;
    whole.written = true;
    whole.write = now;
    cells_.emplace(begin, std::move(whole));
  }
}

void Shadow::unordered(const Clock& known, const OnConflict& on_conflict) const {
  for (const auto& [begin, cell] : cells_) {
    if (cell.written && !known.knows(cell.write.lane, cell.write.tick))
      on_conflict(HazardKind::FreeInFlight, cell.write, begin, cell.end);
    for (const Stamp& read : cell.reads)
      if (!known.knows(read.lane, read.tick))
        on_conflict(HazardKind::FreeInFlight, read, begin, cell.end);
  }
}

}  // namespace simulated
