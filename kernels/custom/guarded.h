// The emulator's memory: between pages that can't be touched, so that an access outside of it is caught.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace headrace {

constexpr size_t kGuardBytes = size_t{8} << 30;  // as far as an int reaches as an index of floats
constexpr size_t kLeastGuardBytes = size_t{64} << 20;  // where addresses are limited (ulimit -v)
constexpr size_t kStackBytes = size_t{256} << 10;
constexpr size_t kStackGuardBytes = size_t{16} << 20;
constexpr size_t kAlignment = 16;
constexpr unsigned char kCanary = 0xA5;
constexpr unsigned char kUnwritten = 0xFF;  // a NaN in every float type

// Memory between two stretches that can't be touched.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    room_ = std::max((bytes + kAlignment + page - 1) / page * page, page);
    if (!(may_reserve_much() && reserve(kGuardBytes)) && !reserve(kLeastGuardBytes)) return;
    if (mprotect(room(), room_, PROT_READ | PROT_WRITE) != 0) return;
    data_ = room() + (room_ - bytes) / kAlignment * kAlignment;  // its end as near to the guard as can be
  }
  ~Guarded() {
    if (base_ != nullptr) munmap(base_, room_ + 2 * guard_);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  bool ok() const { return data_ != nullptr; }
  unsigned char* data() const { return data_; }
  bool holds(const void* address) const { return address >= base_ && address < base_ + room_ + 2 * guard_; }
  int64_t offset(const void* address) const { return static_cast<const unsigned char*>(address) - data_; }
  void fill(unsigned char around, unsigned char inside) {
    std::memset(room(), around, room_);
    std::memset(data_, inside, bytes_);
  }
  bool forbid_writes() { return mprotect(room(), room_, PROT_READ) == 0; }
  // The offset of the nearest byte beside the data that was written; 0 if none was (the data's own is never looked at).
  int64_t overwritten() const {
    const unsigned char* first = room();
    for (const unsigned char* at = data_ + bytes_; at < first + room_; at++)
      if (*at != kCanary) return at - data_;
    for (const unsigned char* at = data_ - 1; at >= first; at--)
      if (*at != kCanary) return at - data_;
    return 0;
  }

 private:
  static bool may_reserve_much() {
    rlimit limit{};
    return getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY;
  }
  bool reserve(size_t guard) {
    void* base = mmap(nullptr, room_ + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return false;
    base_ = static_cast<unsigned char*>(base);
    guard_ = guard;
    return true;
  }
  unsigned char* room() const { return base_ + guard_; }

  size_t bytes_, room_ = 0, guard_ = 0;
  unsigned char* base_ = nullptr;
  unsigned char* data_ = nullptr;
};

// A thread's local variables; what needs more runs into the guard below it.
class Stack {
 public:
  Stack() {
    void* guard = mmap(nullptr, kStackGuardBytes + kStackBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                       -1, 0);
    if (guard == MAP_FAILED) return;
    guard_ = static_cast<char*>(guard);
    if (mprotect(guard_ + kStackGuardBytes, kStackBytes, PROT_READ | PROT_WRITE) != 0) return;
    base_ = guard_ + kStackGuardBytes;
  }
  ~Stack() {
    if (guard_ != nullptr) munmap(guard_, kStackGuardBytes + kStackBytes);
  }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  void* base() const { return base_; }
  bool holds(const void* address) const {
    return address >= guard_ && address < guard_ + kStackGuardBytes + kStackBytes;
  }

 private:
  char* guard_ = nullptr;
  char* base_ = nullptr;
};

}  // namespace headrace
