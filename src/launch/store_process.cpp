#include "launch/store_process.h"

#include <unistd.h>

#include <filesystem>

#include "accelerate/environment.h"
#include "core/text.h"

namespace accelerate::detail::launch {

std::string find_torch_helper() {
  constexpr const char* kName = "accelerate-torch";
  std::error_code error;
  const auto own = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto beside = own.parent_path() / kName;
  if (!error && ::access(beside.c_str(), X_OK) == 0) return beside.string();
  return find_in_path(kName, Environment::process());
}

StoreProcess::StoreProcess(const Descriptor& socket)
    : socket_(socket), program_(find_torch_helper()) {}

void StoreProcess::start() {
  process_ = std::make_unique<ProcessSet>();
  SpawnOptions options;
  options.argv = {program_, "store", "--listen-fd", str(socket_.get())};
  options.inherit = {socket_.get()};
  options.output = StreamTarget::kNull;
  options.no_input = true;
  options.new_session = true;
  process_->spawn(options);
}

}  // namespace accelerate::detail::launch
