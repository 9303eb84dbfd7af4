#include "checkpoint/exchange.h"

#include <chrono>
#include <memory>
#include <optional>
#include <thread>

#include "accelerate/errors.h"
#include "accelerate/operations/objects.h"
#include "core/text.h"

namespace accelerate::detail::checkpoint {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPoll = std::chrono::milliseconds(5);

// What a process has to say: its bytes, or what went wrong.
constexpr char kWorked = '+';
constexpr char kThrew = '-';

class StoreRounds {
 public:
  StoreRounds(StoreExchange where, std::stop_token stop)
      : where_(std::move(where)), stop_(std::move(stop)) {}

  std::vector<std::string> exchange(const std::function<std::string()>& encode) {
    std::string mine;
    std::exception_ptr thrown;
    try {
      mine = kWorked + encode();
    } catch (const std::exception& error) {
      thrown = std::current_exception();
      mine = kThrew + std::string(error.what());
    }
    ++round_;
    where_.store->set(key(where_.rank), std::vector<std::uint8_t>(mine.begin(), mine.end()));
    std::vector<std::string> all;
    for (int rank = 0; rank < where_.size; ++rank) all.push_back(answer_of(rank));
    if (thrown) std::rethrow_exception(thrown);
    for (int rank = 0; rank < where_.size; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      if (all[index].front() == kThrew) {
        throw CommError(str("Saving failed on rank ", rank, ": ", all[index].substr(1)), rank);
      }
      all[index].erase(0, 1);
    }
    return all;
  }

 private:
  [[nodiscard]] std::string key(int rank) const {
    return str(where_.prefix, "/", round_, "/", rank);
  }

  // Asks now and then: a request that waits would keep other threads from the store.
  std::string answer_of(int rank) const {
    const auto deadline = Clock::now() + where_.timeout;
    while (!where_.store->check({key(rank)})) {
      if (stop_.stop_requested() || Clock::now() > deadline) {
        throw CommError(str("Saving failed: rank ", rank,
                            " has not said that it wrote its files. The checkpoint is not "
                            "published; the one before it is."),
                        rank);
      }
      std::this_thread::sleep_for(kPoll);
    }
    const auto bytes = where_.store->get(key(rank));
    return {bytes.begin(), bytes.end()};
  }

  StoreExchange where_;
  std::stop_token stop_;
  int round_ = 0;
};

}  // namespace

Exchange exchange_by_collective(const char* operation, std::source_location where) {
  return [=](const std::function<std::string()>& encode) -> std::vector<std::string> {
    if (comm::is_alone(/*group=*/nullptr)) return {encode()};
    return comm::ObjectMessages::exchange(encode, /*group=*/nullptr, operation, where);
  };
}

Exchange exchange_by_store(const StoreExchange& where, std::stop_token stop) {
  if (where.size == 1) return [](const auto& encode) { return std::vector{encode()}; };
  return [rounds = std::make_shared<StoreRounds>(where, std::move(stop))](const auto& encode) {
    return rounds->exchange(encode);
  };
}

}  // namespace accelerate::detail::checkpoint
