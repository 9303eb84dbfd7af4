#include "accelerate/memory.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <new>
#include <stdexcept>

#include "accelerate/detail/state/reused_memory.h"
#include "core/bytes.h"
#include "core/exception_text.h"
#include "state/accelerator_backend.h"

namespace accelerate {

void clear_device_cache(bool garbage_collection) {
  if (garbage_collection) detail::state::ReusedMemory::of_results().release();
#ifdef __GLIBC__
  if (garbage_collection) ::malloc_trim(0);
#endif
  if (auto* backend = detail::state::accelerator_backend()) {
    backend->empty_cache();
  } else if (at::hasMPS()) {
    at::detail::getMPSHooks().emptyCache();
  } else if (c10::is_privateuse1_backend_registered() || at::hasXPU()) {
    at::accelerator::emptyCache();
  }
}

bool should_reduce_batch_size(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) return true;
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) {
    return detail::tells_of_memory(torch_error->what_without_backtrace());
  }
  if (dynamic_cast<const std::runtime_error*>(&error) != nullptr) {
    return detail::tells_of_memory(error.what());
  }
  return false;
}

bool should_reduce_batch_size(const std::exception_ptr& error) {
  if (error == nullptr) return false;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return should_reduce_batch_size(exception);
  } catch (...) {
    return false;
  }
}

std::string convert_bytes(std::int64_t size) { return detail::convert_bytes(size); }
std::string convert_bytes(double size) { return detail::convert_bytes(size); }

std::int64_t convert_file_size_to_int(std::string_view size) {
  return detail::convert_file_size_to_int(size);
}

std::int64_t convert_file_size_to_int(std::int64_t size) {
  return detail::convert_file_size_to_int(size);
}

}  // namespace accelerate
