// Folders of torch.distributed.checkpoint: read, merged, and refused with the tensor's name.
#include "formats/dcp.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "accelerate/errors.h"
#include "core/files.h"
#include "formats/archive.h"
#include "formats/merge_weights.h"
#include "formats/pickle.h"
#include "formats/pickle_value.h"
#include "formats/safetensors_header.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate::detail::formats {
namespace {

namespace fs = std::filesystem;
using test::message_of;

fs::path reference(const std::string& name) { return test::reference_path("dcp/" + name); }

const DcpEntry& entry(const DcpReader& reader, const std::string& name) {
  for (const auto& entry : reader.entries()) {
    if (entry.name == name) return entry;
  }
  throw std::runtime_error("no " + name);
}

template <class T>
std::vector<T> numbers(const std::string& bytes) {
  std::vector<T> result(bytes.size() / sizeof(T));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

template <class T>
std::vector<T> counted(int count) {
  std::vector<T> result;
  for (int i = 0; i < count; ++i) result.push_back(static_cast<T>(i));
  return result;
}

TEST(DcpReader, ReadsTensorsThatWereShardedAlongAnyDimension) {
  DcpReader reader(reference("model"));
  EXPECT_EQ(reader.entries().size(), 9U);
  const auto read = [&](const std::string& name) {
    return reader.read_tensor(entry(reader, "model." + name));
  };
  EXPECT_EQ(entry(reader, "model.rows").chunks.size(), 2U);
  EXPECT_EQ(numbers<float>(read("rows")), counted<float>(15));
  EXPECT_EQ(numbers<double>(read("deep")), counted<double>(24));
  EXPECT_EQ(numbers<float>(read("one")), counted<float>(2));
  EXPECT_EQ(numbers<float>(read("replicated")), counted<float>(3));
  EXPECT_EQ(numbers<std::int64_t>(read("plain")), counted<std::int64_t>(4));
  EXPECT_EQ(numbers<float>(read("scalar")), std::vector<float>{7});
  EXPECT_EQ(read("empty"), "");
  std::vector<std::uint16_t> bfloat16;  // the upper half of a float
  for (const auto number : counted<float>(24)) {
    bfloat16.push_back(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number) >> 16));
  }
  EXPECT_EQ(numbers<std::uint16_t>(read("columns")), bfloat16);
}

TEST(DcpReader, ReadsValuesThatAreNoTensors) {
  DcpReader reader(reference("optimizer"));
  EXPECT_EQ(reader.read_value(entry(reader, "optimizer.param_groups.0.betas")).repr(),
            "(0.9, 0.999)");
  EXPECT_EQ(Value(entry(reader, "optimizer.param_groups.1.lr").path).repr(),
            "['optimizer', 'param_groups', 1, 'lr']");
}

TEST(MergeWeights, WritesOneSafetensorsFile) {
  const test::Folder folder;
  const auto path = merge_weights(reference("model"), folder.path() / "a" / "b", {});
  EXPECT_EQ(path, folder.path() / "a" / "b" / "model.safetensors");
  const auto bytes = read_whole_file(path);
  const auto header = read_safetensors_header(bytes, "merged");
  EXPECT_EQ(header.metadata.at("format"), "pt");
  EXPECT_EQ(header.tensors.size(), 9U);
  const auto* rows = header.find("rows");
  ASSERT_NE(rows, nullptr);
  EXPECT_EQ(numbers<float>(bytes.substr(static_cast<std::size_t>(header.data_offset + rows->begin),
                                        static_cast<std::size_t>(rows->bytes()))),
            counted<float>(15));
}

/// The value of an archive, and the bytes of its tensors in the order of their places.
std::string contents(const fs::path& path) {
  const FileBytes file(path);
  const ArchiveReader archive(file);
  std::string text = archive.value().repr();
  for (const auto& item : archive.directory().entries()) {
    if (item.name.find("/data/") != item.name.npos) text += file.read(item.offset, item.size);
  }
  return text;
}

TEST(MergeWeights, WritesWhatPythonMakesOfAnOptimizer) {
  const test::Folder folder;
  const auto path =
      merge_weights(reference("optimizer"), folder.path(), {.safe_serialization = false});
  EXPECT_EQ(path, folder.path() / "pytorch_model.bin");
  EXPECT_EQ(contents(path), contents(reference("merged.bin")));
}

TEST(MergeWeights, TellsHowToMergeWhatIsNoTensor) {
  const test::Folder folder;
  EXPECT_EQ(
      message_of<ArgumentError>([&] { merge_weights(reference("optimizer"), folder.path(), {}); }),
      "'optimizer.state.rows.step' is nested deeper, and safetensors files hold tensors by name "
      "only. Merge the checkpoint with --unsafe_serialization (safe_serialization = false), "
      "which writes pytorch_model.bin.");
}

TEST(MergeWeights, RemovesTheCheckpointAfterSuccessIfAsked) {
  const test::Folder folder;
  fs::copy(reference("model"), folder.path() / "in", fs::copy_options::recursive);
  (void)merge_weights(folder.path() / "in", folder.path() / "out", {.remove_checkpoint_dir = true});
  EXPECT_FALSE(fs::exists(folder.path() / "in"));
  EXPECT_TRUE(fs::exists(folder.path() / "out" / "model.safetensors"));
}

TEST(MergeWeights, DoesNotRemoveWhatItWrites) {
  const test::Folder folder;
  const auto in = folder.path() / "in";
  fs::copy(reference("model"), in, fs::copy_options::recursive);
  for (const auto& out : {in, in / "out", folder.path() / "other" / ".." / "in" / "out"}) {
    EXPECT_EQ(message_of<ArgumentError>(
                  [&] { (void)merge_weights(in, out, {.remove_checkpoint_dir = true}); }),
              "The merged weights would be written to '" + out.string() +
                  "' and removed with the checkpoint '" + in.string() +
                  "'. Name an output folder outside of it, or do not ask for "
                  "--remove_checkpoint_dir (remove_checkpoint_dir = true).");
  }
  EXPECT_TRUE(fs::exists(in / ".metadata"));
  EXPECT_FALSE(fs::exists(in / "out"));
  (void)merge_weights(in, folder.path() / "in2", {.remove_checkpoint_dir = true});
  EXPECT_TRUE(fs::exists(folder.path() / "in2" / "model.safetensors"));
}

TEST(MergeWeights, NamesTheFolderToPassInstead) {
  const test::Folder folder;
  const auto message = [&] {
    return message_of<CheckpointError>([&] { merge_weights(folder.path(), folder.path(), {}); });
  };
  const auto here = folder.path().string();
  const auto begin = "Tried to load from " + here + " but couldn't find a valid metadata file.";
  EXPECT_EQ(message(), begin + " It is a folder that FSDP saves with SHARDED_STATE_DICT.");
  fs::create_directory(folder.path() / "optimizer_0");
  EXPECT_EQ(message(), begin +
                           " However, a potential optimizer checkpoint directory exists. Please "
                           "try passing in " +
                           here + "/optimizer_0 instead.");
  fs::create_directory(folder.path() / "pytorch_model_fsdp_0");
  EXPECT_EQ(message(), begin +
                           " However, potential model and optimizer checkpoint directories "
                           "exist. Please pass in either " +
                           here + "/pytorch_model_fsdp_0 or " + here + "/optimizer_0 instead.");
}

// Hand-made metadata of one tensor "w" of float32.

Value object(const std::string& type, Value state,
             const std::string& module = "torch.distributed.checkpoint.metadata") {
  auto call = std::make_shared<PickleCall>();
  call->module = module;
  call->name = type;
  call->state = std::move(state);
  return Value(Value::Leaf(std::move(call)));
}

Value sizes_of(const std::vector<std::int64_t>& sizes) {
  return Value::tuple(Value::List(sizes.begin(), sizes.end()));
}

struct Box {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> sizes;
  std::string file = "__0_0.distcp";
  std::int64_t offset = 0;
  std::int64_t length = 1 << 20;
  Value transforms = {};
};

std::string metadata(const std::vector<std::int64_t>& sizes, const std::vector<Box>& boxes,
                     const Value& path = Value::tuple({"w"})) {
  Value::List chunks;
  PickleCall::Entries places;
  std::int64_t shift = 0;
  for (const auto& box : boxes) {
    chunks.push_back(object("ChunkStorageMetadata", Value::Dict{{"offsets", sizes_of(box.offsets)},
                                                                {"sizes", sizes_of(box.sizes)}}));
    Value::Dict info{
        {"relative_path", box.file}, {"offset", box.offset + shift}, {"length", box.length}};
    if (!box.transforms.is_none()) info.set("transform_descriptors", box.transforms);
    if (box.offset == 0) shift += 1 << 20;
    places.emplace_back(
        object("MetadataIndex",
               Value::Dict{{"fqn", "w"}, {"index", 0}, {"offset", sizes_of(box.offsets)}}),
        object("_StorageInfo", Value(std::move(info)), "torch.distributed.checkpoint.filesystem"));
  }
  const Value float32(std::make_shared<PickleGlobal>("torch", "float32"));
  const auto tensor = object(
      "TensorStorageMetadata",
      Value::Dict{{"properties", object("TensorProperties", Value::tuple({float32, Value()}))},
                  {"size", sizes_of(sizes)},
                  {"chunks", std::move(chunks)}});
  return pickle_dumps(object(
      "Metadata",
      Value::Dict{{"state_dict_metadata", Value::Dict{{"w", tensor}}},
                  {"planner_data", Value::Dict{{"w", path}}},
                  {"storage_data", Value(std::make_shared<PickleDict>(std::move(places)))}}));
}

std::string error_of(const std::string& bytes) {
  const std::string begin = "'m', byte 0: the metadata of the checkpoint: ";
  const auto message = message_of<FormatError>([&] { (void)read_dcp_metadata(bytes, "m"); });
  return message.starts_with(begin) ? message.substr(begin.size()) : message;
}

TEST(DcpMetadata, AcceptsChunksThatCoverATensor) {
  EXPECT_EQ(error_of(metadata({4, 2}, {{{0, 0}, {4, 1}}, {{0, 1}, {3, 1}}, {{3, 1}, {1, 1}}})),
            "nothing was thrown");
  // An empty chunk, as the last of many processes has it.
  EXPECT_EQ(error_of(metadata({1}, {{{0}, {1}}, {{1}, {0}}})), "nothing was thrown");
}

TEST(DcpMetadata, RefusesChunksThatDoNotFit) {
  EXPECT_EQ(error_of(metadata({4}, {{{0}, {2}}, {{1}, {2}}})), "two chunks of 'w' overlap at (1).");
  EXPECT_EQ(error_of(metadata({4}, {{{0}, {2}}, {{3}, {1}}})),
            "the chunks of 'w' have 12 of its 16 bytes.");
  EXPECT_EQ(error_of(metadata({4}, {{{3}, {2}}})),
            "a chunk of 'w' at (3) with sizes (2) is not inside (4).");
  EXPECT_EQ(error_of(metadata({4}, {{{0, 0}, {4, 1}}})),
            "a chunk of 'w' has another rank than the tensor.");
  EXPECT_EQ(error_of(metadata({4}, {{{INT64_MAX}, {1}}})),
            "a chunk of 'w' at (9223372036854775807) with sizes (1) is not inside (4).");
}

TEST(DcpMetadata, RefusesTensorsThatAreLargerThanTheirFiles) {
  EXPECT_EQ(error_of(metadata({1 << 30, 1 << 30}, {{{0, 0}, {1 << 30, 1 << 30}}})),
            "a chunk of 'w' of 4611686018427387904 bytes lies in 1048576 bytes.");
  EXPECT_EQ(error_of(metadata({INT64_MAX, 4}, {})),
            "the sizes (9223372036854775807, 4) of 'w' are too large.");
  // Two chunks over the same bytes.
  EXPECT_EQ(error_of(metadata({4}, {{.offsets = {0}, .sizes = {2}, .offset = 64},
                                    {.offsets = {2}, .sizes = {2}, .offset = 65}})),
            "two places at byte 65 of '__0_0.distcp' overlap.");
}

TEST(DcpMetadata, RefusesFilesOutsideTheFolder) {
  for (const std::string name : {"../x.distcp", "/etc/passwd", "..", ""}) {
    EXPECT_EQ(error_of(metadata({1}, {{.offsets = {0}, .sizes = {1}, .file = name}})),
              "the file '" + name + "' is not in the folder of the checkpoint.");
  }
}

TEST(DcpMetadata, RefusesPathsThatAreTooLong) {
  EXPECT_EQ(error_of(metadata({1}, {{{0}, {1}}}, Value::tuple(Value::List(64, Value("a"))))),
            "nothing was thrown");
  EXPECT_EQ(error_of(metadata({1}, {{{0}, {1}}}, Value::tuple(Value::List(65, Value("a"))))),
            "the path of 'w' has 65 steps; at most 64 are read.");
}

TEST(MergeWeights, RefusesPositionsThatLeaveGaps) {
  const test::Folder folder;
  std::ofstream(folder / "__0_0.distcp") << "x";
  const auto merged = [&](std::int64_t position) {
    std::ofstream(folder / ".metadata")
        << metadata({1}, {{{0}, {1}}}, Value::tuple({"root", "a", position}));
    return message_of<CheckpointError>([&] {
      (void)merge_weights(folder.path(), folder.path() / "out", {.safe_serialization = false});
    });
  };
  const auto gap = [](const std::string& position) {
    return "The path of 'w' in the checkpoint, ['root', 'a', " + position +
           "], does not fit the other paths.";
  };
  EXPECT_EQ(merged(3), gap("3"));
  EXPECT_EQ(merged(-1), gap("-1"));
  EXPECT_EQ(merged(INT64_MAX), gap("9223372036854775807"));
  EXPECT_NE(merged(0).find("are not inside the file"), std::string::npos);
}

TEST(DcpMetadata, RefusesTransformedData) {
  EXPECT_EQ(
      error_of(metadata({1}, {{.offsets = {0}, .sizes = {1}, .transforms = Value::List{"zstd"}}})),
      "the data was transformed when it was saved (['zstd']), which is not read. Save the "
      "checkpoint without transforms.");
}

TEST(DcpMetadata, RefusesOtherPickles) {
  EXPECT_EQ(error_of(pickle_dumps(Value(3))), "expected an object of class Metadata, found int.");
  EXPECT_EQ(error_of(pickle_dumps(object("Metadata", Value::Dict{}))),
            "the field 'storage_data' is missing.");
}

TEST(DcpReader, RefusesPlacesBeyondTheEndOfTheirFile) {
  const test::Folder folder;
  std::ofstream(folder / ".metadata") << metadata({4}, {{{0}, {4}}});
  std::ofstream(folder / "__0_0.distcp") << "x";
  DcpReader reader(folder.path());
  EXPECT_EQ(
      message_of<FormatError>([&] { (void)reader.read_tensor(reader.entries()[0]); }),
      "'" + (folder / "__0_0.distcp") +
          "', byte 0: 'w': its 1048576 bytes at byte 0 are not inside the file, which has 1.");
}

/// What reading an entry of 4 float32 throws if its chunk is `tensor`, of which storage and strides
/// are set here.
std::string error_of_chunk(const std::shared_ptr<PickleTensor>& tensor) {
  const test::Folder folder;
  std::string file;
  auto storage = std::make_shared<PickleStorage>();
  storage->key = "0";
  storage->dtype = "float32";
  storage->location = "cpu";
  storage->bytes = 16;
  tensor->storage = storage;
  tensor->dtype = "float32";
  tensor->strides = {1};
  ArchiveWriter archive([&](std::string_view bytes) { file += bytes; }, "archive",
                        pickle_dumps(Value(Value::Leaf(tensor))));
  archive.begin_storage("0", 16);
  archive.append("1234567812345678");
  archive.end_storage();
  archive.finish();
  std::ofstream(folder / "__0_0.distcp") << file;
  std::ofstream(folder / ".metadata") << metadata(
      {4}, {{.offsets = {0}, .sizes = {4}, .length = static_cast<std::int64_t>(file.size())}});
  DcpReader reader(folder.path());
  const auto message =
      message_of<FormatError>([&] { (void)reader.read_tensor(reader.entries()[0]); });
  return message.substr(message.find("'w'"));
}

TEST(DcpReader, RefusesAChunkOfAnotherShape) {
  auto tensor = std::make_shared<PickleTensor>();
  tensor->sizes = {2};
  EXPECT_EQ(error_of_chunk(tensor),
            "'w': the chunk is tensor(..., size=(2,), dtype=torch.float32), expected sizes (4) and "
            "dtype torch.float32.");
}

TEST(DcpReader, RefusesAChunkWhoseValuesAreNotThoseOfItsStorage) {
  auto tensor = std::make_shared<PickleTensor>();
  tensor->sizes = {4};
  tensor->is_negated = true;
  EXPECT_EQ(error_of_chunk(tensor),
            "'w': the chunk is tensor(..., size=(4,), dtype=torch.float32, negated), expected "
            "sizes (4) and dtype torch.float32.");
}

}  // namespace
}  // namespace accelerate::detail::formats
