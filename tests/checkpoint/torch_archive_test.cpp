#include "accelerate/torch_archive.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "accelerate/errors.h"
#include "support/command.h"
#include "support/message_of.h"
#include "support/reference_path.h"

namespace accelerate {
namespace {

using test::message_of;

std::string reference(const std::string& name) {
  return test::reference_path("torch_archive/" + name);
}

std::string bytes_of(const at::Tensor& tensor) {
  const auto dense = tensor.contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

std::string counted_bytes(bool truths) {
  std::string bytes(48, '\0');
  for (int i = 0; i < 48; ++i)
    bytes[static_cast<std::size_t>(i)] = static_cast<char>(truths ? i % 2 : i);
  return bytes;
}

/// What comes back after a file was written and read.
Value stored(const Value& value) {
  const test::Folder folder;
  torch_save(value, folder / "value.pt");
  return torch_load(folder / "value.pt");
}

TEST(TorchLoad, ReadsEveryDtypeThatPythonWrites) {
  const Value tensors = torch_load(reference("dtypes.pt"));
  EXPECT_EQ(tensors.as_dict().size(), 22U);
  for (const auto& [key, value] : tensors.as_dict()) {
    const auto& tensor = value.as_tensor();
    EXPECT_EQ(c10::getDtypeNames(tensor.scalar_type()).first, key.as_string());
    EXPECT_EQ(bytes_of(tensor), counted_bytes(key.as_string() == "bool")) << key.repr();
  }
}

TEST(TorchSave, WritesEveryDtypeThatPythonReads) {
  const Value tensors = torch_load(reference("dtypes.pt"));
  const Value again = stored(tensors);
  for (const auto& [key, value] : tensors.as_dict()) {
    EXPECT_EQ(again.at(key).as_tensor().scalar_type(), value.as_tensor().scalar_type());
    EXPECT_EQ(bytes_of(again.at(key).as_tensor()), bytes_of(value.as_tensor())) << key.repr();
  }
}

TEST(TorchLoad, ReadsPlainDataAsPythonPrintsIt) {
  Value value = torch_load(reference("plain.pt"));
  EXPECT_EQ(value.at("array").as_tensor().scalar_type(), at::kUInt32);
  EXPECT_EQ(value.at("array").as_tensor().sizes(), at::IntArrayRef({2, 3}));
  value.as_dict().erase("array");
  EXPECT_EQ(value.repr(),
            "{'none': None, 'truth': [True, False], 'ints': [0, 255, 256, 65535, 65536, -1, "
            "2147483647, -2147483648, 3000000000, 9223372036854775807, -9223372036854775808], "
            "'doubles': (0.0, -0.0, 1e-05, inf, 0.1), 'texts': ['', 'weight', '\xc3\xa4\xe4\xb8\xad"
            "\xf0\x9f\x98\x80', 'weight'], 'bytes': [b'', b'\\x00\\xff\\x80abc'], 'bytearray': "
            "b'\\x01\\x02', 'nested': {1: {'a': []}, 7: (), 'ordered': {'b': 1, 'a': 2}}, 'size': "
            "(2, 3), 'float64': 2.5, 'int64': -3, 'bool_': True, 'counter': {3: 1, 5: 2}}");
  EXPECT_EQ(stored(value), value);
}

TEST(TorchLoad, KeepsObjectsOfOtherClassesOpaque) {
  const Value value = torch_load(reference("objects.pt"));
  EXPECT_EQ(value.at("set").repr(), "builtins.set([1])");
  EXPECT_EQ(value.at("complex").repr(), "builtins.complex(1.0, 2.0)");
  EXPECT_EQ(value.at("device").repr(), "torch.device('cpu')");
  EXPECT_EQ(value.at("dtype").repr(), "torch.float32");
  EXPECT_EQ(value.at("pairs").repr(), "{(1, 2): 3}");
  EXPECT_EQ(value.at("big").repr(),
            "int.from_bytes(b'\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x01', 'little', "
            "signed=True)");
  EXPECT_EQ(message_of<ArgumentError>([&] { (void)value.at("sparse").as_tensor(); }).substr(0, 51),
            "The value is of kind Python object, not tensor: tor");
}

void expect_shared(const Value& value) {
  const auto tensor = [&](const char* name) { return value.at(name).as_tensor(); };
  EXPECT_TRUE(tensor("tied").is_same(tensor("weight")));
  EXPECT_TRUE(tensor("transposed").is_alias_of(tensor("weight")));
  EXPECT_TRUE(tensor("row").is_alias_of(tensor("weight")));
  EXPECT_TRUE(tensor("row").equal(torch::tensor({4.0F, 5.0F, 6.0F, 7.0F})));
  EXPECT_TRUE(tensor("step").equal(torch::tensor({1.0F, 4.0F, 7.0F, 10.0F})));
  EXPECT_TRUE(tensor("transposed").equal(tensor("weight").t()));
  EXPECT_EQ(tensor("expanded").strides(), at::IntArrayRef({0, 0}));
  EXPECT_EQ(tensor("expanded").sizes(), at::IntArrayRef({2, 3}));
  EXPECT_EQ(tensor("scalar").item<std::int64_t>(), 5);
  EXPECT_EQ(tensor("empty").sizes(), at::IntArrayRef({0, 3}));
  EXPECT_TRUE(tensor("parameter").requires_grad());
  EXPECT_TRUE(tensor("grad").requires_grad());
  EXPECT_FALSE(tensor("weight").requires_grad());
}

TEST(TorchLoad, KeepsSharedStoragesShared) { expect_shared(torch_load(reference("shared.pt"))); }

TEST(TorchLoad, GivesConjugatedAndNegatedViewsTheirValues) {
  const Value value = torch_load(reference("flagged.pt"));
  const auto& views = value.at("views").as_dict();
  EXPECT_EQ(views.size(), 5U);
  for (const auto& [key, view] : views) {
    const auto& tensor = view.as_tensor();
    EXPECT_TRUE(tensor.is_conj() || tensor.is_neg()) << key.repr();
    EXPECT_TRUE(torch::view_as_real(tensor.resolve_conj().resolve_neg().to(at::kComplexFloat))
                    .equal(torch::view_as_real(
                        value.at("values").at(key).as_tensor().to(at::kComplexFloat))))
        << key.repr();
  }
  EXPECT_TRUE(value.at("views").at("both").as_tensor().is_alias_of(
      value.at("views").at("conj").as_tensor()));
  EXPECT_TRUE(value.at("views").at("parameter").as_tensor().requires_grad());
}

TEST(TorchLoad, ReadsArchivesWithoutTheEntriesOfNewerVersions) {
  expect_shared(torch_load(reference("shared_1_6.pt")));
}

TEST(TorchLoad, ComparesChecksumsIfAsked) {
  expect_shared(torch_load(reference("shared.pt"), {.verify_checksums = true}));
  const auto legacy = reference("legacy.pt");
  EXPECT_EQ(
      message_of<ArgumentError>([&] { (void)torch_load(legacy, {.verify_checksums = true}); }),
      "'" + legacy +
          "' is a file from before Torch 1.6, which has no checksums. Load it without "
          "verify_checksums.");
}

/// Whether the bytes at `address` are those of a file.
bool is_mapped(const void* address, const std::string& path) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto begin = std::stoull(line, nullptr, 16);
    const auto end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (at >= begin && at < end) return line.ends_with(path);
  }
  return false;
}

TEST(TorchLoad, MapsTheFileForAnyIndexOfTheCpu) {
  for (const std::string device : {"cpu", "cpu:0", "cpu:1"}) {
    const Value value =
        torch_load(reference("shared.pt"), {.map_location = c10::Device(device), .mmap = true});
    EXPECT_TRUE(is_mapped(value.at("weight").as_tensor().data_ptr(), "shared.pt")) << device;
  }
}

TEST(TorchLoad, MapsTheFileIfAsked) {
  const Value value = torch_load(reference("shared.pt"), {.mmap = true});
  expect_shared(value);
  value.at("weight").as_tensor().fill_(1);  // in memory only
  expect_shared(torch_load(reference("shared.pt")));
}

TEST(TorchSave, KeepsSharedStoragesShared) {
  expect_shared(stored(torch_load(reference("shared.pt"))));
}

TEST(TorchLoad, ReadsFilesFromBeforeTorch16) {
  const Value value = torch_load(reference("legacy.pt"));
  EXPECT_EQ(value.at("epoch").as_int(), 3);
  EXPECT_TRUE(value.at("weight").as_tensor().equal(torch::arange(6.0)));
  EXPECT_TRUE(value.at("tied").as_tensor().is_same(value.at("weight").as_tensor()));
  EXPECT_TRUE(value.at("view").as_tensor().equal(torch::tensor({2.0F, 3.0F})));
  EXPECT_TRUE(value.at("view").as_tensor().is_alias_of(value.at("weight").as_tensor()));
}

TEST(TorchLoad, ReadsTheStateDictOfAModule) {
  const Value value = torch_load(reference("module.v1.bin"));
  EXPECT_EQ(value.as_dict().size(), 6U);
  EXPECT_TRUE(value.at("1.weight").as_tensor().equal(torch::full({2, 1, 1}, 0.5)));
  EXPECT_FALSE(value.at("0.weight").as_tensor().requires_grad());
}

TEST(TorchSave, WritesTheStateDictOfAModule) {
  const torch::nn::Linear module(2, 3);
  const test::Folder folder;
  torch_save(state_dict(*module), folder / "model.bin");
  const Value value = torch_load(folder / "model.bin");
  EXPECT_EQ(value.as_dict().keys().front().as_string(), "weight");
  EXPECT_TRUE(value.at("bias").as_tensor().equal(module->bias));
  EXPECT_FALSE(value.at("weight").as_tensor().requires_grad());
}

TEST(TorchLoad, MovesTensorsToTheGivenDevice) {
  const Value value = torch_load(reference("shared.pt"), {.map_location = c10::Device(c10::kMeta)});
  EXPECT_TRUE(value.at("weight").as_tensor().is_meta());
}

TEST(TorchSave, RefusesWhatIsNoStridedData) {
  const test::Folder folder;
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { torch_save(Value(torch::eye(2).to_sparse()), folder / "a.pt"); }),
            "A tensor to be saved has layout Sparse. Only dense tensors with data can be saved; "
            "convert it first.");
  EXPECT_EQ(message_of<ArgumentError>(
                [&] { torch_save(Value(torch::empty({2}, at::kMeta)), folder / "a.pt"); }),
            "A tensor to be saved has layout Strided and no data (meta device). Only dense tensors "
            "with data can be saved; convert it first.");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(TorchSave, WritesConjugatedViewsAsTheirValues) {
  const auto tensor = torch::complex(torch::ones(2), torch::ones(2)).conj();
  EXPECT_TRUE(stored(Value(tensor)).as_tensor().equal(tensor));
}

TEST(TorchSave, KeepsTheDtypesOfTensorsThatShareAStorage) {
  const auto floats = torch::tensor({1.0F, -2.0F});
  const auto bits = floats.view(at::kInt);
  const Value again = stored(Value::Dict{{"floats", floats}, {"bits", bits}});
  EXPECT_TRUE(again.at("floats").as_tensor().equal(floats));
  EXPECT_EQ(again.at("bits").as_tensor().scalar_type(), at::kInt);
  EXPECT_TRUE(again.at("bits").as_tensor().equal(bits));
  EXPECT_TRUE(again.at("bits").as_tensor().is_alias_of(again.at("floats").as_tensor()));
}

TEST(TorchSave, WritesStoragesThatEndInsideAnElement) {
  const auto bytes = torch::arange(9, at::kByte);
  const auto shorts = bytes.slice(0, 0, 8).view(at::kShort);
  EXPECT_TRUE(stored(Value(shorts)).as_tensor().equal(shorts));
  const Value again = stored(Value::Dict{{"shorts", shorts}, {"bytes", bytes}});
  EXPECT_TRUE(again.at("shorts").as_tensor().equal(shorts));
  EXPECT_TRUE(again.at("bytes").as_tensor().equal(bytes));
}

TEST(TorchSave, RefusesTensorsThatItDidNotLoad) {
  const test::Folder folder;
  const Value value = torch_load(reference("objects.pt"));
  const auto message =
      message_of<ArgumentError>([&] { torch_save(value.at("sparse"), folder / "a.pt"); });
  EXPECT_EQ(message.substr(0, 93),
            "A value to be saved is a Python object with tensors of the file it was loaded from: "
            "torch._ut");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(TorchLoad, IgnoresTheGradientFlagOfIntegers) {
  const test::Folder folder;
  torch_save(Value(torch::arange(3)), folder / "a.pt");
  std::fstream file(folder / "a.pt", std::ios::in | std::ios::out | std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  file.seekp(
      static_cast<std::streamoff>(bytes.find("\x89"
                                             "ccollections")));
  file.put('\x88');  // True
  file.close();
  EXPECT_TRUE(torch_load(folder / "a.pt").as_tensor().equal(torch::arange(3)));
}

TEST(TorchLoad, NamesFilesThatAreNoArchives) {
  const auto path = reference("bare.pkl");
  EXPECT_EQ(message_of<FormatError>([&] { (void)torch_load(path); }),
            "'" + path +
                "', byte 0: the file is a bare pickle and no archive of torch.save. Load it in "
                "Python and save its weights again with torch.save, or as safetensors.");
  EXPECT_EQ(message_of<CheckpointError>([] { (void)torch_load("nowhere.pt"); }),
            "Cannot read 'nowhere.pt': No such file or directory.");
}

}  // namespace
}  // namespace accelerate
