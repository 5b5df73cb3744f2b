// A lean stand-in for torch/extension.h while DeepSpeed's CPU ops are compiled (Containerfile.cpu, stage "ops").
//
// PyTorch's own header pulls in its whole C++ frontend (layers, optimizers, data loaders), of which these ops use
// nothing: 60 s of compile time per source file with it, 20 s with this. Code and ABI stay the same.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;  // as in torch/types.h
}  // namespace torch
