"""The MLPerf Tiny networks of the shared folder, read from their float TFLite files as PyTorch networks.

Needs the package `tflite`, the generated reader of the file format. Padding that is not symmetric becomes symmetric
with zeros around the kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tflite
import torch
from common import shared
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

FILES = {
    "ResNet-8": "pretrainedResnet.tflite",
    "DS-CNN": "kws_ref_model_float32.tflite",
    "MobileNetV1-0.25": "vww_96_float.tflite",
    "autoencoder": "ad01_fp32.tflite",
}
_OPERATOR_NAMES = {value: name for name, value in vars(tflite.BuiltinOperator).items() if isinstance(value, int)}
_RELU, _RELU6, _SAME = 1, 3, 0  # of the file format


class TfliteNetwork(PreTrainedModel):
    """A network of convolutions, as a list of operators; softmax at the end is left out."""

    config_class = PreTrainedConfig
    main_input_name = "pixel_values"

    def __init__(self, name: str) -> None:
        super().__init__(PreTrainedConfig())
        content = (shared() / "weights" / "mlperf_tiny" / FILES[name]).read_bytes()
        self._model: Any = tflite.Model.GetRootAs(content, 0)
        self._graph: Any = self._model.Subgraphs(0)
        [source] = self._graph.InputsAsNumpy()
        shape = self._shape(source)
        self.input_shape = (shape[3], shape[1], shape[2]) if len(shape) == 4 else (shape[1],)
        self.layers = nn.ModuleDict()
        self.steps: list[tuple[str, list[int], int]] = []  # name of the layer or operator, tensors it reads, its result
        self.first = int(source)
        for index in range(self._graph.OperatorsLength()):
            self._add(index, self._graph.Operators(index))
        self._model = self._graph = None  # modules are copied, and these are not
        self.eval()

    def forward(self, pixel_values: Tensor) -> ImageClassifierOutput:
        known = {self.first: pixel_values}
        result = pixel_values
        for name, sources, target in self.steps:
            if name == "add":
                result = F.relu(known[sources[0]] + known[sources[1]])
            else:
                result = self.layers[name](known[sources[0]])
            known[target] = result
        return ImageClassifierOutput(logits=result)

    def _add(self, index: int, operator: Any) -> None:
        code = self._model.OperatorCodes(operator.OpcodeIndex())
        kind = _OPERATOR_NAMES[max(code.BuiltinCode(), code.DeprecatedBuiltinCode())]
        inputs, [output] = operator.InputsAsNumpy().tolist(), operator.OutputsAsNumpy().tolist()
        name = f"{index:02d}_{kind.lower()}"
        if kind == "SOFTMAX":
            return
        if kind == "ADD":
            assert self._options(operator, tflite.AddOptions).FusedActivationFunction() == _RELU
            self.steps.append(("add", inputs, output))
            return
        if kind in ("CONV_2D", "DEPTHWISE_CONV_2D"):
            self.layers[name] = self._convolution(operator, kind, inputs, output)
        elif kind == "FULLY_CONNECTED":
            self.layers[name] = self._linear(operator, inputs)
        elif kind == "AVERAGE_POOL_2D":
            assert self._shape(output)[1:3] == [1, 1]
            self.layers[name] = nn.AdaptiveAvgPool2d(1)
        else:
            assert kind == "RESHAPE" and len(self._shape(output)) == 2, kind
            self.layers[name] = nn.Flatten()
        self.steps.append((name, inputs[:1], output))

    def _convolution(self, operator: Any, kind: str, inputs: list[int], output: int) -> nn.Module:
        depthwise = kind == "DEPTHWISE_CONV_2D"
        options = self._options(operator, tflite.DepthwiseConv2DOptions if depthwise else tflite.Conv2DOptions)
        weight = self._tensor(inputs[1])  # [out, height, width, in], or [1, height, width, channels]
        weight = weight.permute(3, 0, 1, 2) if depthwise else weight.permute(0, 3, 1, 2)
        stride = [options.StrideH(), options.StrideW()]
        sizes = zip(self._shape(inputs[0])[1:3], self._shape(output)[1:3], weight.shape[2:], stride, strict=True)
        padding, around = [], []
        for size, result, kernel, step in sizes:
            total = max((result - 1) * step + kernel - size, 0) if options.Padding() == _SAME else 0
            before, after = total // 2, total - total // 2
            padding.append(after)
            around = [after - before, 0, *around]  # F.pad begins with the last axis
        weight = F.pad(weight, around)
        groups = self._shape(inputs[0])[3] if depthwise else 1
        layer = nn.Conv2d(
            weight.shape[1] * groups, len(weight), tuple(weight.shape[2:]), tuple(stride), tuple(padding), groups=groups
        )
        return self._filled(layer, weight, inputs, options.FusedActivationFunction())

    def _linear(self, operator: Any, inputs: list[int]) -> nn.Module:
        weight = self._tensor(inputs[1])
        activation = self._options(operator, tflite.FullyConnectedOptions).FusedActivationFunction()
        return self._filled(nn.Linear(weight.shape[1], weight.shape[0]), weight, inputs, activation)

    def _filled(self, layer: nn.Conv2d | nn.Linear, weight: Tensor, inputs: list[int], activation: int) -> nn.Module:
        layer.weight.data.copy_(weight)
        assert layer.bias is not None
        layer.bias.data.copy_(self._tensor(inputs[2]))
        return nn.Sequential(layer, *{_RELU: [nn.ReLU()], _RELU6: [nn.ReLU6()], 0: []}[activation])

    @staticmethod
    def _options(operator: Any, cls: Any) -> Any:
        options, table = cls(), operator.BuiltinOptions()
        options.Init(table.Bytes, table.Pos)
        return options

    def _shape(self, tensor: int) -> list[int]:
        shape: list[int] = self._graph.Tensors(tensor).ShapeAsNumpy().tolist()
        return shape

    def _tensor(self, index: int) -> Tensor:
        """Return the values of a stored tensor; int8 weights are dequantized."""
        tensor = self._graph.Tensors(index)
        raw = self._model.Buffers(tensor.Buffer()).DataAsNumpy()
        if tensor.Type() == tflite.TensorType.INT8:
            scales = torch.from_numpy(tensor.Quantization().ScaleAsNumpy().copy())
            values = torch.from_numpy(raw.view(np.int8).copy()).float().reshape(self._shape(index))
            return values * scales.reshape(-1, *[1] * (values.dim() - 1))
        return torch.from_numpy(raw.view(np.float32).copy()).reshape(self._shape(index))
