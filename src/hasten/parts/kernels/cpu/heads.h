// The tensors of an attention, as both of its kernels read them.
#pragma once
#include <cstdint>

namespace {

template <class T>
struct Heads {  // (tokens, heads, width) with any distance between tokens and between heads
  const T* at;
  int64_t token, head;
  const T* of(int64_t t, int64_t h) const { return at + t * token + h * head; }
};

struct Shape {
  int64_t tokens, heads, groups, dk, dv;  // groups: heads of keys and values
  float scale;
};

}  // namespace
