#include "accelerate/accelerator/step_members.h"

#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "accelerate/constants.h"
#include "accelerate/errors.h"
#include "accelerator/accelerator_core.h"
#include "core/text.h"

namespace accelerate {
namespace {

using detail::str;

/// Writes the trace of this process, if a folder is wanted for it.
void write_trace(Profiler& profiler, const ProfileKwargs& options, int process_index) {
  if (!options.output_trace_dir) return;
  const auto& folder = *options.output_trace_dir;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw ConfigError(str("output_trace_dir is '", folder.string(),
                          "', which cannot be made: ", error.message(), "."));
  }
  std::string name(kProfilePatternName);
  constexpr std::string_view kSuffix = "{suffix}";
  name.replace(name.find(kSuffix), kSuffix.size(), std::to_string(process_index));
  profiler.export_chrome_trace(folder / name);
}

}  // namespace

StepMembers::StepMembers(std::shared_ptr<detail::accelerator::AcceleratorCore> core)
    : steps_of_(std::move(core)) {}
StepMembers::~StepMembers() = default;

Profiler StepMembers::profiled(const ProfileKwargs* given, const std::function<void(Profiler&)>& f,
                               std::source_location where) const {
  const auto& core = *steps_of_;
  const auto* handler = find_handler<ProfileKwargs>(core.options.kwargs_handlers);
  const auto options = given != nullptr ? *given : handler != nullptr ? *handler : ProfileKwargs{};
  Profiler profiler(options);
  profiler.start();
  try {
    f(profiler);
    profiler.stop();
  } catch (...) {
    try {  // the trace shows what came before the error
      profiler.stop();
      write_trace(profiler, options, core.state.process_index());
    } catch (...) {  // NOLINT(bugprone-empty-catch): the first error counts
    }
    throw;
  }
  write_trace(profiler, options, core.state.process_index());
  if (options.output_trace_dir) core.state.wait_for_everyone(where);
  return profiler;
}

}  // namespace accelerate
