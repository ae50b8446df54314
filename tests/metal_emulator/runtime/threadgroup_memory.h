// Threadgroup arrays that know who touched which element since the last barrier.
//
// Two threads may touch an element between two barriers only if both read it. Whatever the schedule, a missing barrier
// is therefore found at the access, as are an index out of range and a read of an element that nobody has written.
// Simd functions do not order threadgroup memory, so they are no excuse.
#pragma once
#include <cstdint>

#include "scheduler.h"

namespace emulator {

constexpr uint32_t NOBODY = 0xffffffffu;
constexpr uint32_t SEVERAL = 0xfffffffeu;

template <class T>
struct Shared_cell {
  T value;
  uint32_t write_epoch = 0, writer = NOBODY;  // the last write
  uint32_t read_epoch = 0, reader = NOBODY;   // the reads since the last barrier
};

template <class T>
class Shared_element {
 public:
  Shared_element(Shared_cell<T>& cell, int line) : cell_(cell), line_(line) {}

  operator T() const {
    if (cell_.write_epoch < group_start) {
      fail("uninitialised read of threadgroup memory", line_);
    }
    if (cell_.write_epoch == epoch && cell_.writer != running->index) {
      fail("race on threadgroup memory: read of what another thread wrote with no barrier between", line_);
    }
    const bool others_read = cell_.read_epoch == epoch && cell_.reader != running->index;
    cell_.reader = others_read ? SEVERAL : running->index;
    cell_.read_epoch = epoch;
    return cell_.value;
  }

  Shared_element& operator=(T value) {
    if (cell_.write_epoch == epoch && cell_.writer != running->index) {
      fail("race on threadgroup memory: two threads write with no barrier between", line_);
    }
    if (cell_.read_epoch == epoch && cell_.reader != running->index) {
      fail("race on threadgroup memory: write to what another thread read with no barrier between", line_);
    }
    cell_.value = value;
    cell_.write_epoch = epoch;
    cell_.writer = running->index;
    return *this;
  }

  Shared_element& operator=(const Shared_element& other) { return *this = T(other); }
  Shared_element& operator+=(T value) { return *this = T(*this) + value; }

 private:
  Shared_cell<T>& cell_;
  int line_;
};

template <class T, std::size_t N>
class Shared_array {
 public:
  struct Index {  // carries the line of the access
    std::size_t value;
    int line;
    template <class I>
    Index(I index, int at = __builtin_LINE()) : value(std::size_t(index)), line(at) {}
  };

  Shared_element<T> operator[](Index index) {
    if (index.value >= N) fail("threadgroup array index out of range", index.line);
    return {cells_[index.value], index.line};
  }

 private:
  Shared_cell<T> cells_[N];
};

}  // namespace emulator
