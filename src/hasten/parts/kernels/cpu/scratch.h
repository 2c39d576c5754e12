// Memory that a thread keeps from call to call, so that no call waits for pages of the system.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace {

// Contents are whatever was there.
struct Scratch {
  char* memory = nullptr;
  size_t bytes = 0;
  template <class T>
  T* get(int64_t count) {
    size_t wanted = (count * sizeof(T) + 4095) / 4096 * 4096;
    if (wanted > bytes) {
      std::free(memory);
      memory = static_cast<char*>(std::aligned_alloc(4096, wanted));
      bytes = memory ? wanted : 0;
    }
    return reinterpret_cast<T*>(memory);
  }
  ~Scratch() { std::free(memory); }
};

}  // namespace
