// The search behind find_executable_batch_size. Here and not beside the rest of
// accelerate/memory.h, because processes may have to agree on each size.
#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "accelerate/errors.h"
#include "accelerate/memory.h"
#include "accelerate/operations.h"
#include "accelerate/state.h"
#include "core/call_site.h"
#include "core/exception_text.h"
#include "core/text.h"

// The class is declared in accelerate/memory.h; the search is here because it communicates.
namespace accelerate::detail::state {
namespace {

/// How an attempt ended, from good to bad.
enum class Outcome : std::int64_t { kFits, kTooLarge, kFailed };

/// What every process tells, in rank order.
std::vector<std::int64_t> tell_everyone(std::int64_t number, std::source_location where) {
  const PartialState state;
  const auto mine = at::full({1}, number, at::TensorOptions(at::kLong).device(state.device()));
  const auto all = accelerate::gather(mine, where).cpu();
  const auto* numbers = all.const_data_ptr<std::int64_t>();
  return {numbers, numbers + all.numel()};
}

Outcome worst_outcome(Outcome mine, std::int64_t batch_size, std::source_location where) {
  const auto all = tell_everyone(static_cast<std::int64_t>(mine), where);
  const auto worst = std::ranges::max_element(all);
  if (static_cast<Outcome>(*worst) == Outcome::kFailed && mine != Outcome::kFailed) {
    const auto rank = static_cast<int>(worst - all.begin());
    throw CommError(str("find_executable_batch_size: rank ", rank, " failed at batch size ",
                        batch_size, ", and not for want of memory. Its own message says why."),
                    rank);
  }
  return static_cast<Outcome>(*worst);
}

/// In one line. "" for what the others know already.
std::string text_of(const std::exception_ptr& error) {
  if (error == nullptr) return "";
  try {
    std::rethrow_exception(error);
  } catch (const CommError&) {
    return "";
  } catch (...) {
    return core::split(current_exception_text().text(), '\n').front();
  }
}

std::int64_t smaller(const BatchSizeOptions& options, std::int64_t failed) {
  // Python's int(size * 0.9), in the same arithmetic.
  if (!options.reduce) return static_cast<std::int64_t>(static_cast<double>(failed) * 0.9);
  const auto next = options.reduce(failed);
  if (next >= 0 && next < failed) return next;
  throw ArgumentError(str("The reduce function of find_executable_batch_size returned ", next,
                          " for the batch size ", failed,
                          ": it must return a smaller size that is not negative."));
}

}  // namespace

BatchSizeSearch::BatchSizeSearch(BatchSizeOptions options)
    : options_(std::move(options)), batch_size_(options_.starting_batch_size) {}

void BatchSizeSearch::run(const std::function<void(std::int64_t)>& attempt,
                          std::source_location where) {
  const bool agree = options_.agree_across_processes && PartialState().use_distributed();
  clear_device_cache(/*garbage_collection=*/true);
  for (;;) {
    if (agree) batch_size_ = std::ranges::min(tell_everyone(batch_size_, where));
    if (batch_size_ <= 0) throw StateError("No executable batch size found, reached zero.");

    std::exception_ptr error;
    try {
      attempt(batch_size_);
    } catch (...) {
      error = std::current_exception();
    }
    auto outcome = error == nullptr                  ? Outcome::kFits
                   : should_reduce_batch_size(error) ? Outcome::kTooLarge
                                                     : Outcome::kFailed;
    if (agree) {
      // The others may be in a collective of the attempt: their report then says what became of it.
      const auto remark = text_of(error);
      const AfterRemark after(remark.c_str());
      try {
        outcome = worst_outcome(outcome, batch_size_, where);
      } catch (...) {
        // The others cannot be told. What went wrong here first is the better message.
        if (outcome == Outcome::kFailed) std::rethrow_exception(error);
        throw;
      }
    }
    if (outcome == Outcome::kFits) return;
    if (outcome == Outcome::kFailed) std::rethrow_exception(error);

    // Only now, with the stack unwound and the error gone, does nothing hold the tensors any more.
    error = nullptr;
    clear_device_cache(/*garbage_collection=*/true);
    batch_size_ = smaller(options_, batch_size_);
  }
}

}  // namespace accelerate::detail::state
