// accelerate/errors.h - what this library throws.
//
// Every error derives from `Error`. Catch a kind when you can act on it:
//
//     ConfigError       options, flags, files or variables do not parse, or contradict each other
//     ArgumentError     what a call was given cannot be used
//     StateError        the right call at the wrong moment
//     CommError         processes disagree, or one is gone; rank() says which
//     CheckpointError   a file is missing, torn or does not fit; path() says which
//     UnsupportedError  a valid wish that this build, device or language cannot grant
//
// A message names the thing in your words, the value that came, what was expected and what to do.
#pragma once

#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>

#include "accelerate/api.h"

namespace accelerate {

/// The base of everything this library throws on purpose.
class ACCELERATE_API Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
  ~Error() override;
};

/// Options, flags, files or environment variables do not parse or contradict each other.
class ACCELERATE_API ConfigError : public Error {
 public:
  using Error::Error;
  ~ConfigError() override;
};

/// The argument of a call cannot be used.
class ACCELERATE_API ArgumentError : public Error {
 public:
  using Error::Error;
  ~ArgumentError() override;
};

/// The right call at the wrong moment.
class ACCELERATE_API StateError : public Error {
 public:
  using Error::Error;
  ~StateError() override;
};

/// Processes disagree, or one of them is gone.
class ACCELERATE_API CommError : public Error {
 public:
  explicit CommError(const std::string& message, int rank = -1) : Error(message), rank_(rank) {}
  ~CommError() override;

  /// The process at fault, or -1 when no single one is known.
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

/// Debug mode found that processes entered one operation with inputs that do not fit together.
class ACCELERATE_API DistributedOperationException : public CommError {
 public:
  using CommError::CommError;
  ~DistributedOperationException() override;
};

/// A file or folder of a checkpoint is missing, torn or does not fit.
class ACCELERATE_API CheckpointError : public Error {
 public:
  explicit CheckpointError(const std::string& message, std::filesystem::path path = {})
      : Error(message), path_(std::move(path)) {}
  ~CheckpointError() override;

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// A file is not what its format says it must be.
class ACCELERATE_API FormatError : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
  ~FormatError() override;
};

/// Names, shapes or dtypes of a state dictionary do not fit the model.
class ACCELERATE_API StateDictMismatch : public CheckpointError {
 public:
  using CheckpointError::CheckpointError;
  ~StateDictMismatch() override;
};

/// A valid wish that this build, this device or this language cannot grant.
class ACCELERATE_API UnsupportedError : public Error {
 public:
  using Error::Error;
  ~UnsupportedError() override;
};

}  // namespace accelerate
