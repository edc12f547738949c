// Memory of one thread that grows to the largest need and stays: no allocation in a step.
#pragma once
#include <cstddef>
#include <cstdlib>

namespace octavo {

class Scratch {
 public:
  ~Scratch() { free(memory_); }
  // Aligned to 64 bytes; what it held is gone when it grows.
  void* of(size_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = aligned_alloc(64, size_);
      if (!memory_) abort();
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace octavo
