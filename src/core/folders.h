// src/core/folders.h - changes of folders that survive a crash.
//
// All functions throw `CheckpointError` with the path and the reason.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

#include "core/descriptor.h"

namespace accelerate::detail::inline core {

/// Creates a folder and those above it that are missing, and flushes their names to the disk.
void make_folders(const std::filesystem::path& folder);

/// Flushes a file, or the names in a folder, to the disk. Has no effect on file systems that cannot
/// do so.
void flush_path(const std::filesystem::path& path);

/// Renames a file or folder. To be flushed by the caller.
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);

/// Puts the folder `from` in the place of `to`, and removes what was there: at once where the file
/// system can exchange names, so that a reader finds the old folder or the new one. To be flushed
/// by the caller.
void replace_folder(const std::filesystem::path& from, const std::filesystem::path& to);

/// Removes a file, or a folder with all that is in it, if it is there.
void remove_path(const std::filesystem::path& path);

/// What is in a folder, in the order of names.
[[nodiscard]] std::vector<std::filesystem::directory_entry> entries_in(
    const std::filesystem::path& folder);

/// Shared locks of several owners go together.
enum class LockKind : std::uint8_t { kExclusive, kShared };
/// Locks a folder against others that lock it, until the descriptor is closed or its process ends.
/// Has no effect on file systems without locks. `purpose` is what it is locked for, in the error
/// that is thrown if another lock is not given back within some seconds.
[[nodiscard]] Descriptor lock_folder(const std::filesystem::path& folder, std::string_view purpose,
                                     LockKind kind = LockKind::kExclusive);
/// Makes a lock one of another kind, without waiting. Returns false if other locks stand against
/// it; the folder is not locked then.
[[nodiscard]] bool change_lock(const Descriptor& lock, LockKind kind);
/// Throws what `lock_folder` does when it has waited.
[[noreturn]] void refuse_lock(const std::filesystem::path& folder, std::string_view purpose);

}  // namespace accelerate::detail::inline core
