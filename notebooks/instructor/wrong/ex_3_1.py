"""Plausible wrong answers to 3.1: a term of the algebra is missing, or the model is changed."""

import copy

import torch
from torch import nn

from fxlab.passes import fold_conv_bn


def _fold(conv, bn, s=None, bias=None, folded=None):
    with torch.no_grad():
        mean = bn.running_mean
        gamma = torch.ones_like(mean) if bn.weight is None else bn.weight
        beta = torch.zeros_like(mean) if bn.bias is None else bn.bias
        old = torch.zeros_like(mean) if conv.bias is None else conv.bias
        if s is None:
            s = gamma / torch.sqrt(bn.running_var + bn.eps)
        folded = copy.deepcopy(conv) if folded is None else folded
        folded.weight = nn.Parameter(conv.weight * s.reshape(-1, 1, 1, 1))
        folded.bias = nn.Parameter((old - mean) * s + beta if bias is None else bias(old, mean, s))
    return folded


def wrong_no_root(conv, bn):
    return _fold(conv, bn, s=(1 if bn.weight is None else bn.weight) / (bn.running_var + bn.eps))


def wrong_no_eps(conv, bn):
    gamma = 1 if bn.weight is None else bn.weight
    return _fold(conv, bn, s=gamma / torch.sqrt(bn.running_var))


def wrong_bias_not_scaled(conv, bn):
    beta = 0 if bn.bias is None else bn.bias
    return _fold(conv, bn, bias=lambda old, mean, s: old - mean * s + beta)


def wrong_input_channels(conv, bn):
    folded = _fold(conv, bn)
    with torch.no_grad():
        s = bn.weight / torch.sqrt(bn.running_var + bn.eps)
        folded.weight = nn.Parameter(conv.weight * s.reshape(1, -1, 1, 1))
    return folded


def wrong_bias_needed(conv, bn):
    with torch.no_grad():
        s = bn.weight / torch.sqrt(bn.running_var + bn.eps)
        folded = copy.deepcopy(conv)
        folded.weight = nn.Parameter(conv.weight * s.reshape(-1, 1, 1, 1))
        folded.bias = nn.Parameter((conv.bias - bn.running_mean) * s + bn.bias)
    return folded


def wrong_settings_lost(conv, bn):
    new = nn.Conv2d(conv.in_channels, conv.out_channels, conv.kernel_size).double()
    return _fold(conv, bn, folded=new)


def wrong_in_place(conv, bn):
    folded = _fold(conv, bn)
    with torch.no_grad():
        conv.weight.copy_(folded.weight)
    return folded


def wrong_same_layer(conv, bn):
    return _fold(conv, bn, folded=conv)


def wrong_delegation(conv, bn):
    return fold_conv_bn(conv, bn)
