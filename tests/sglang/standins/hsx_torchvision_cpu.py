"""Stand-in: declares two C++ operators of torchvision, so that its CUDA-built wheel imports on a CPU."""

import importlib.abc
import sys


class _Declare(importlib.abc.MetaPathFinder):
    """Acts once, just before torchvision looks for its operators; finds nothing itself."""

    library = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision._meta_registrations" and _Declare.library is None:
            import torch

            _Declare.library = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                _Declare.library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Declare())
