#include "core/validate.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

namespace fastattn::core {
namespace {

[[noreturn]] void wrong_value(const std::string& message) {
  throw ArgumentError(ArgumentError::Kind::kValue, message);
}

void at_least(const char* name, int value, int least) {
  if (value < least) {
    wrong_value(std::string(name) + ": got " + std::to_string(value) + ", takes " +
                std::to_string(least) + " or more");
  }
}

void at_most(const char* name, int value, int most) {
  if (value > most) {
    wrong_value(std::string(name) + ": got " + std::to_string(value) + ", takes up to " +
                std::to_string(most));
  }
}

// What a kernel computes with offsets of 64 bits must fit them.
void countable(const char* name, int batch, int heads, int length, int dim) {
  std::int64_t count = 1;
  for (const std::int64_t size : {batch, heads, length, dim}) {
    if (size != 0 && count > std::numeric_limits<std::int64_t>::max() / size) {
      wrong_value(std::string(name) + ": shape [" + std::to_string(batch) + ", " +
                  std::to_string(heads) + ", " + std::to_string(length) + ", " +
                  std::to_string(dim) + "] has more elements than 64 bits can count");
    }
    count *= size;
  }
}

void not_null(const char* name, const void* pointer, bool has_elements) {
  if (has_elements && pointer == nullptr) {
    wrong_value(std::string(name) + ": null pointer, but the shape has elements");
  }
}

}  // namespace

void validate(const ForwardParams& p) {
  at_least("batch", p.batch, 0);
  at_least("heads_q", p.heads_q, 0);
  at_least("heads_kv", p.heads_kv, 0);
  at_least("len_q", p.len_q, 0);
  at_least("len_kv", p.len_kv, 0);
  at_most("len_q", p.len_q, kMaxLength);
  at_most("len_kv", p.len_kv, kMaxLength);
  at_least("head_dim", p.head_dim, 1);
  at_least("head_dim_v", p.head_dim_v, 1);
  at_least("window_left", p.mask.window_left, -1);
  at_least("window_right", p.mask.window_right, -1);
  if (static_cast<unsigned>(p.dtype) > static_cast<unsigned>(DType::kBFloat16)) {
    wrong_value("dtype: got " + std::to_string(static_cast<unsigned>(p.dtype)) +
                ", which is no DType");
  }
  countable("q", p.batch, p.heads_q, p.len_q, p.head_dim);
  countable("k", p.batch, p.heads_kv, p.len_kv, p.head_dim);
  countable("v", p.batch, p.heads_kv, p.len_kv, p.head_dim_v);
  countable("out", p.batch, p.heads_q, p.len_q, p.head_dim_v);
  const bool heads_fit = p.heads_kv == 0 ? p.heads_q == 0 : p.heads_q % p.heads_kv == 0;
  if (!heads_fit) {
    wrong_value("heads: the " + std::to_string(p.heads_q) +
                " query heads are not a multiple of the " + std::to_string(p.heads_kv) +
                " key/value heads (takes [batch, heads, length, head_dim])");
  }
  if (!std::isfinite(p.scale)) {
    wrong_value("scale: got " + std::to_string(p.scale) + ", takes a finite number");
  }
  const bool has_rows = !is_empty(p);
  const bool has_keys = p.batch > 0 && p.heads_kv > 0 && p.len_kv > 0;
  not_null("q", p.q, has_rows);
  not_null("k", p.k, has_keys);
  not_null("v", p.v, has_keys);
  not_null("out", p.out, has_rows);
}

}  // namespace fastattn::core
