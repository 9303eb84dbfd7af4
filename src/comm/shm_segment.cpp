#include "comm/shm_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <sstream>

#include "core/text.h"

namespace accelerate::detail::comm {
namespace {

using Clock = WaitBudget::Clock;
using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free &&
              std::atomic<std::uint64_t>::is_always_lock_free);

constexpr std::uint64_t kMagic = 0x6163'6365'6c73'686d;
constexpr const char* kName = "accelerate";
constexpr std::size_t kPage = 4096;
// The ranks look around this often while they sleep: a death is noticed within it.
constexpr auto kSlice = std::chrono::milliseconds(100);
// Ranks that share a core hand it to each other within microseconds. One that got it back later
// than this, when what it waited for had come, does not try again for twenty times as long.
constexpr auto kCostlyYield = std::chrono::microseconds(200);
constexpr int kSleepAfterCostlyYield = 20;
// After so many waits in a row for which keeping the core did not help, only some still try.
constexpr unsigned kVainSpins = 8;
constexpr unsigned kSpinAgain = 64;

std::size_t up_to(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::string why() { return std::strerror(errno); }

// Not FUTEX_PRIVATE: the word lies in memory of several processes.
long futex(const Word& word, int operation, std::uint32_t value, const timespec* limit = nullptr) {
  return ::syscall(SYS_futex, &word, operation, value, limit, nullptr, 0);
}

void wake_all(const Word& word) { futex(word, FUTEX_WAKE, INT_MAX); }

// Sleeps for a slice or until `end`; true if not woken.
bool sleep_while(const Word& word, std::uint32_t value, Clock::time_point end) {
  const auto now = Clock::now();
  if (end <= now) return true;
  const auto limit = std::min<std::chrono::nanoseconds>(kSlice, end - now);
  const timespec relative{0, static_cast<long>(limit.count())};
  return futex(word, FUTEX_WAIT, value, &relative) < 0 && errno == ETIMEDOUT;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int cores_of_this_process() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return ::sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

bool crowded(int ranks) { return ranks > cores_of_this_process(); }

// Ranks that share cores lose more with each meeting than with what is not in the cache any more.
std::size_t chunks_per_slot(int ranks) {
  return crowded(ranks) ? static_cast<std::size_t>(std::clamp(32 / ranks, 1, 4)) : 1;
}

// Where pidfd_open is forbidden. A process that has ended may still be listed, as a zombie.
bool listed_as_running(int process) {
  std::ifstream file(str("/proc/", process, "/stat"));
  std::string text;
  if (!std::getline(file, text)) return false;
  const auto name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= text.size()) return true;
  const char state = text[name_end + 2];
  return state != 'Z' && state != 'X';
}

std::uint64_t pack(const ShmOutcome& outcome) {
  return static_cast<std::uint64_t>(outcome.fault) << 32 | static_cast<std::uint32_t>(outcome.rank);
}

ShmOutcome unpack(std::uint64_t word) {
  return {static_cast<ShmFault>(word >> 32),
          static_cast<std::int32_t>(static_cast<std::uint32_t>(word))};
}

}  // namespace

// Written by its rank only, but for the bell.
struct alignas(128) ShmSegment::Line {
  Word step{0};
  Word left{0};
  std::int32_t process = 0;
  // By the parity of the step: no rank can be two steps ahead of another.
  std::array<std::atomic<std::uint64_t>, 2> calls{};
  alignas(128) Word bell{0};
  Word listeners{0};
};

// Words that are written at different moments lie in different cache lines.
struct ShmSegment::Header {
  std::uint64_t magic = kMagic;
  std::uint64_t token = 0;
  std::int32_t size = 0;
  std::uint64_t chunk_bytes = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t mailbox_bytes = 0;
  std::int64_t direct_bytes = 0;
  alignas(128) std::atomic<std::uint64_t> arrivals{0};
  alignas(128) Word epoch{0};  // the last complete step
  alignas(128) Word sleepers{0};
  alignas(128) std::atomic<std::uint64_t> fault{0};
  std::array<Line, kMaxRanks> lines{};

  [[nodiscard]] std::size_t slots_at() const { return up_to(sizeof(Header), kPage); }
  [[nodiscard]] std::size_t rings_at() const {
    return slots_at() + static_cast<std::size_t>(size) * 2 * slot_bytes;
  }
  [[nodiscard]] std::size_t ring_stride() const {
    return up_to(sizeof(ShmRing) + mailbox_bytes, kPage);
  }
  [[nodiscard]] std::size_t ring_at(int from, int to) const {
    return rings_at() + (static_cast<std::size_t>(from) * size + to) * ring_stride();
  }
  [[nodiscard]] std::size_t bytes() const { return ring_at(size, 0); }
};

ShmPauses::ShmPauses(std::chrono::microseconds spin, int yields, Habits& habits) noexcept
    : yields_(yields), spinning_(spin.count() > 0), habits_(&habits) {
  if (!spinning_) return;
  if (habits.vain_spins.load(std::memory_order_relaxed) >= kVainSpins) {
    spinning_ = habits.vain_spins.fetch_add(1, std::memory_order_relaxed) % kSpinAgain == 0;
  }
  if (spinning_) spin_until_ = Clock::now() + spin;
}

bool ShmPauses::next() noexcept {
  if (spinning_) {
    relax();
    // Looking at the clock takes as long as a few pauses.
    if (++spins_ % 32 == 0 && Clock::now() >= spin_until_) {
      spinning_ = false;
      habits_->vain_spins.fetch_add(1, std::memory_order_relaxed);
    }
    return true;
  }
  if (yields_ <= 0) return false;
  --yields_;
  const auto before = Clock::now();
  const auto not_before = habits_->no_yield_before.load(std::memory_order_relaxed);
  if (before.time_since_epoch().count() < not_before) return false;
  ::sched_yield();
  const auto after = Clock::now();
  if (after - before > kCostlyYield) {
    yields_ = 0;
    next_yield_ = after + (after - before) * kSleepAfterCostlyYield;
  }
  return true;
}

void ShmPauses::came() noexcept {
  if (spinning_) habits_->vain_spins.store(0, std::memory_order_relaxed);
  if (next_yield_ != Clock::time_point{}) {
    habits_->no_yield_before.store(next_yield_.time_since_epoch().count(),
                                   std::memory_order_relaxed);
  }
}

ShmSegment::ShmSegment(int rank, int size, const ShmOptions& options) : rank_(rank), size_(size) {
  watched_.assign(size, -1);
  tune(options);
}

// A rank that spins keeps the one it waits for from running when the two share a core.
void ShmSegment::tune(const ShmOptions& options) {
  spin_ =
      options.spin.count() >= 0 ? options.spin : std::chrono::microseconds(crowded(size_) ? 0 : 5);
  yields_ = options.yields >= 0 ? options.yields : 50;
}

std::unique_ptr<ShmSegment> ShmSegment::make(int size, const ShmOptions& options,
                                             std::string& why_not) {
  Header plan;
  plan.size = size;
  plan.chunk_bytes = up_to(std::max<std::size_t>(options.chunk_bytes, 1), kPage);
  plan.slot_bytes = plan.chunk_bytes * chunks_per_slot(size);
  plan.mailbox_bytes = std::max<std::size_t>(options.mailbox_bytes, 256);
  plan.direct_bytes = std::min<std::int64_t>(options.direct_bytes, plan.chunk_bytes);
  if (::getrandom(&plan.token, sizeof plan.token, 0) != sizeof plan.token) plan.token = ::getpid();

  std::unique_ptr<ShmSegment> segment(new ShmSegment(0, size, options));
  segment->fd_ = ::memfd_create(kName, MFD_CLOEXEC);
  if (segment->fd_ < 0) {
    why_not = str("the system grants no shared memory: ", why());
    return nullptr;
  }
  // Memory for the rings is taken when a pair of ranks first exchanges messages. What is taken
  // here is really there: without it the first write might end the process.
  const int error = ::posix_fallocate(segment->fd_, 0, static_cast<off_t>(plan.rings_at()));
  if (error != 0 || ::ftruncate(segment->fd_, static_cast<off_t>(plan.bytes())) != 0) {
    if (error != 0) errno = error;
    why_not = str("no ", plan.rings_at() >> 20, " MiB of shared memory: ", why());
    return nullptr;
  }
  if (!segment->map(segment->fd_, plan.bytes(), why_not)) return nullptr;
  auto* header = ::new (static_cast<void*>(segment->base_)) Header;
  header->token = plan.token;
  header->size = plan.size;
  header->chunk_bytes = plan.chunk_bytes;
  header->slot_bytes = plan.slot_bytes;
  header->mailbox_bytes = plan.mailbox_bytes;
  header->direct_bytes = plan.direct_bytes;
  segment->header_ = header;
  header->lines[0].process = ::getpid();
  return segment;
}

std::string ShmSegment::address() const {
  return str("/proc/", ::getpid(), "/fd/", fd_, " ", header_->token);
}

std::unique_ptr<ShmSegment> ShmSegment::open(const std::string& address, int rank, int size,
                                             const ShmOptions& options, std::string& why_not) {
  std::istringstream parts(address);
  std::string path;
  std::uint64_t token = 0;
  parts >> path >> token;
  const auto elsewhere = [&](const std::string& reason) {
    why_not = str("rank ", rank, " cannot open ", path, " of rank 0 (", reason,
                  "); it may be on another host or in another container");
    return nullptr;
  };
  // On another host the path may lead to anything; opening some files has effects.
  std::array<char, 64> target{};
  if (::readlink(path.c_str(), target.data(), target.size() - 1) < 0) return elsewhere(why());
  if (!std::string(target.data()).starts_with(str("/memfd:", kName))) {
    return elsewhere("it is another file");
  }
  std::unique_ptr<ShmSegment> segment(new ShmSegment(rank, size, options));
  segment->fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (segment->fd_ < 0) return elsewhere(why());
  struct stat facts{};
  if (::fstat(segment->fd_, &facts) != 0 ||
      facts.st_size < static_cast<off_t>(sizeof(ShmSegment::Header))) {
    return elsewhere("it is too small");
  }
  if (!segment->map(segment->fd_, static_cast<std::size_t>(facts.st_size), why_not)) return nullptr;
  auto* header = reinterpret_cast<Header*>(segment->base_);
  if (header->magic != kMagic || header->token != token || header->size != size) {
    return elsewhere("it belongs to another group");
  }
  segment->header_ = header;
  header->lines[rank].process = ::getpid();
  return segment;
}

bool ShmSegment::map(int fd, std::size_t bytes, std::string& why_not) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    why_not = str("rank ", rank_, " cannot map ", bytes >> 20, " MiB of shared memory: ", why());
    return false;
  }
  base_ = static_cast<std::byte*>(memory);
  mapped_ = bytes;
  return true;
}

ShmSegment::~ShmSegment() {
  if (header_ != nullptr) leave();
  for (const int fd : watched_) {
    if (fd >= 0) ::close(fd);
  }
  if (base_ != nullptr) ::munmap(base_, mapped_);
  if (fd_ >= 0) ::close(fd_);
}

void ShmSegment::watch_peers() {
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    watched_[rank] = static_cast<int>(::syscall(SYS_pidfd_open, header_->lines[rank].process, 0));
  }
}

std::size_t ShmSegment::chunk_bytes() const noexcept { return header_->chunk_bytes; }
std::size_t ShmSegment::slot_bytes() const noexcept { return header_->slot_bytes; }

std::int64_t ShmSegment::direct_bytes() const noexcept { return header_->direct_bytes; }

ShmSlots ShmSegment::slots(std::uint64_t step) const noexcept {
  return {base_ + header_->slots_at(), header_->slot_bytes, step, rank_, size_};
}

void ShmSegment::arrive(std::uint64_t call) noexcept {
  if (failed_.fault != ShmFault::kNone) return;
  ++step_;
  call_ = call;
  waiting_since_ = {};
  auto& line = header_->lines[rank_];
  line.calls[step_ & 1].store(call, std::memory_order_relaxed);
  line.step.store(static_cast<std::uint32_t>(step_), std::memory_order_release);
  const auto before = header_->arrivals.fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 != step_ * static_cast<std::uint64_t>(size_)) return;
  // The last one: a sleeper announces itself before it looks at the epoch for the last time.
  header_->epoch.store(static_cast<std::uint32_t>(step_), std::memory_order_seq_cst);
  if (header_->sleepers.load(std::memory_order_seq_cst) != 0) wake_all(header_->epoch);
}

bool ShmSegment::complete() const noexcept {
  const auto epoch = header_->epoch.load(std::memory_order_acquire);
  return static_cast<std::int32_t>(epoch - static_cast<std::uint32_t>(step_)) >= 0;
}

bool ShmSegment::behind(int rank) const noexcept {
  const auto step = header_->lines[rank].step.load(std::memory_order_acquire);
  return static_cast<std::int32_t>(step - static_cast<std::uint32_t>(step_)) < 0;
}

ShmOutcome ShmSegment::await(const WaitBudget& patience, const CallGuard* guard) {
  if (failed_.fault != ShmFault::kNone) return failed_;
  const auto outcome = complete() ? compare_calls() : wait_for_all(patience, guard);
  if (outcome.fault != ShmFault::kPending && outcome.fault != ShmFault::kClosed) failed_ = outcome;
  return outcome;
}

// Among the ranks that have arrived: the call of most ranks is the right one. Where there is no
// majority the first rank that is elsewhere is named.
ShmOutcome ShmSegment::compare_calls() {
  std::array<std::uint64_t, kMaxRanks> calls{};
  int first_other = -1;
  for (int rank = 0; rank < size_; ++rank) {
    calls[rank] = behind(rank) ? 0 : header_->lines[rank].calls[step_ & 1].load();
    if (calls[rank] != 0 && calls[rank] != call_ && first_other < 0) first_other = rank;
  }
  if (first_other < 0) return {};
  const auto in_call = [&](std::uint64_t call) {
    return std::count(calls.begin(), calls.begin() + size_, call);
  };
  for (int rank = 0; rank < size_; ++rank) {
    if (calls[rank] == 0 || in_call(calls[rank]) * 2 <= size_) continue;
    const auto stray = std::find_if(calls.begin(), calls.begin() + size_,
                                    [&](auto call) { return call != 0 && call != calls[rank]; });
    return report_fault({ShmFault::kOtherCall, static_cast<int>(stray - calls.begin())});
  }
  return report_fault({ShmFault::kOtherCall, first_other});
}

ShmOutcome ShmSegment::wait_for_all(const WaitBudget& patience, const CallGuard* guard) {
  const auto start = Clock::now();
  if (waiting_since_ == Clock::time_point{}) waiting_since_ = start;
  const auto pending = [&] { return ShmOutcome{ShmFault::kPending, -1}; };
  if (patience.until <= start) {
    // A caller that polls must find a dead peer too.
    const bool seldom = start - waiting_since_ >= kSlice;
    const auto outcome = seldom ? look_around(patience, guard) : glance(guard);
    return outcome.fault == ShmFault::kNone ? pending() : outcome;
  }
  for (auto pauses = this->pauses(); pauses.next();) {
    if (!complete()) continue;
    pauses.came();
    return compare_calls();
  }
  if (!patience.sleep) return pending();

  const auto end = std::min(patience.until, waiting_since_ + patience.timeout);
  for (;;) {
    if (const auto outcome = glance(guard); outcome.fault != ShmFault::kNone) return outcome;
    const bool undisturbed = sleep_until(end);
    if (complete()) return compare_calls();
    if (!undisturbed) continue;
    if (const auto outcome = look_around(patience, guard); outcome.fault != ShmFault::kNone) {
      return outcome;
    }
    if (Clock::now() >= patience.until) return pending();
  }
}

// True if not woken.
bool ShmSegment::sleep_until(Clock::time_point end) noexcept {
  header_->sleepers.fetch_add(1, std::memory_order_seq_cst);
  const auto epoch = header_->epoch.load(std::memory_order_seq_cst);
  bool timed_out = false;
  if (static_cast<std::int32_t>(epoch - static_cast<std::uint32_t>(step_)) < 0 && !closed()) {
    timed_out = sleep_while(header_->epoch, epoch, end);
  }
  header_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return timed_out;
}

// The checks that need no system call.
ShmOutcome ShmSegment::glance(const CallGuard* guard) {
  ShmOutcome outcome = reported_fault();
  if (closed()) outcome = {ShmFault::kClosed, rank_};
  if (outcome.fault == ShmFault::kNone && guard != nullptr && guard->failed()) {
    outcome = {ShmFault::kVerdict, -1};
  }
  for (int rank = 0; rank < size_ && outcome.fault == ShmFault::kNone; ++rank) {
    if (header_->lines[rank].left.load() != 0 && behind(rank)) {
      outcome = report_fault({ShmFault::kLeft, rank});
    }
  }
  // All may have arrived before that happened.
  return complete() ? compare_calls() : outcome;
}

// The checks after a wait in which nothing happened.
ShmOutcome ShmSegment::look_around(const WaitBudget& patience, const CallGuard* guard) {
  if (const auto outcome = glance(guard); outcome.fault != ShmFault::kNone) return outcome;
  // The ranks that have arrived may be in different calls.
  if (const auto outcome = compare_calls(); outcome.fault != ShmFault::kNone) return outcome;
  int missing = -1;
  for (int rank = size_ - 1; rank >= 0; --rank) {
    if (!behind(rank)) continue;
    missing = rank;
    const auto state = state_of(rank);
    // It may have arrived and ended between the two looks.
    if (state != ShmFault::kNone && behind(rank)) return report_fault({state, rank});
  }
  if (missing >= 0 && Clock::now() - waiting_since_ >= patience.timeout) {
    return report_fault({ShmFault::kLate, missing});
  }
  return {};
}

ShmFault ShmSegment::state_of(int rank) const noexcept {
  if (rank == rank_) return ShmFault::kNone;
  const auto& line = header_->lines[rank];
  if (line.left.load() != 0) return ShmFault::kLeft;
  bool ended = false;
  if (watched_[rank] >= 0) {
    pollfd peer{watched_[rank], POLLIN, 0};
    ended = ::poll(&peer, 1, 0) == 1;
  } else {
    ended = !listed_as_running(line.process);
  }
  if (!ended) return ShmFault::kNone;
  return line.left.load() != 0 ? ShmFault::kLeft : ShmFault::kDied;
}

// The first fault counts: all ranks report the same one.
ShmOutcome ShmSegment::report_fault(ShmOutcome outcome) noexcept {
  std::uint64_t none = 0;
  if (header_->fault.compare_exchange_strong(none, pack(outcome))) {
    wake_all(header_->epoch);
    for (int rank = 0; rank < size_; ++rank) ring_bell(rank);
    return outcome;
  }
  return unpack(none);
}

ShmOutcome ShmSegment::reported_fault() const noexcept { return unpack(header_->fault.load()); }

ShmRing& ShmSegment::ring(int from, int to) const noexcept {
  // New memory is zero, which is an empty ring.
  return *reinterpret_cast<ShmRing*>(base_ + header_->ring_at(from, to));
}

std::byte* ShmSegment::ring_data(int from, int to) const noexcept {
  return base_ + header_->ring_at(from, to) + sizeof(ShmRing);
}

std::size_t ShmSegment::ring_bytes() const noexcept { return header_->mailbox_bytes; }

bool ShmSegment::prepare_ring(int to) noexcept {
  return ::posix_fallocate(fd_, static_cast<off_t>(header_->ring_at(rank_, to)),
                           static_cast<off_t>(header_->ring_stride())) == 0;
}

void ShmSegment::ring_bell(int rank) noexcept {
  auto& line = header_->lines[rank];
  line.bell.fetch_add(1, std::memory_order_seq_cst);
  if (line.listeners.load(std::memory_order_seq_cst) != 0) wake_all(line.bell);
}

std::uint32_t ShmSegment::bell() const noexcept { return header_->lines[rank_].bell.load(); }

void ShmSegment::await_bell(std::uint32_t seen, Clock::time_point end) noexcept {
  auto& line = header_->lines[rank_];
  line.listeners.fetch_add(1, std::memory_order_seq_cst);
  if (line.bell.load(std::memory_order_seq_cst) == seen && !closed()) {
    static_cast<void>(sleep_while(line.bell, seen, end));
  }
  line.listeners.fetch_sub(1, std::memory_order_seq_cst);
}

void ShmSegment::close() noexcept {
  closed_.store(true);
  // The others wake up too, look around and sleep on.
  wake_all(header_->epoch);
  ring_bell(rank_);
}

void ShmSegment::leave() noexcept {
  if (header_->lines[rank_].left.exchange(1) != 0) return;
  wake_all(header_->epoch);
  for (int rank = 0; rank < size_; ++rank) ring_bell(rank);
}

std::string ShmSegment::describe(const ShmOutcome& outcome) const {
  const auto who = [&]() -> std::string {
    if (outcome.rank < 0) return "any of the ranks";
    return str("rank ", outcome.rank, " (process ", header_->lines[outcome.rank].process, ")");
  };
  switch (outcome.fault) {
    case ShmFault::kOtherCall:
      return outcome.rank == rank_ ? str(who(), " is in another call than the others")
                                   : str(who(), " is in another call than rank ", rank_);
    case ShmFault::kLeft:
      return str(who(), " has left the group");
    case ShmFault::kDied:
      return str(who(), " has ended");
    case ShmFault::kLate:
      return str(who(), " did not come in time");
    case ShmFault::kClosed:
      return str("rank ", rank_, " closed the group while the call was under way");
    default:
      return "the group has failed";
  }
}

}  // namespace accelerate::detail::comm
