"""The recipes of this distribution, which `dpkfc` finds by the entry point `dpkfc.recipes`."""

from __future__ import annotations

from dataclasses import replace

from dpkfc_papers.recipes import generation, images, regression, sentences

RECIPES = tuple(
    replace(recipe, package="dpkfc_papers.recipes")
    for recipe in (
        images.MNIST_MLP,
        images.MNIST_VIT,
        images.CIFAR10_WRN,
        images.CIFAR10_RESNET20,
        images.CIFAR10_VIT,
        images.CIFAR10_VIT_SMALL,
        images.CIFAR10_CROSSVIT,
        images.CIFAR100_WRN,
        images.CIFAR100_VIT,
        images.CIFAR100_CROSSVIT,
        images.SVHN_WRN,
        images.UTKFACE_RESNET20,
        images.PATHMNIST_CNN,
        regression.LINEAR_REGRESSION,
        sentences.IMDB_LOGISTIC,
        sentences.SST2_MINILM,
        sentences.AG_NEWS_MINILM,
        sentences.STACKOVERFLOW_MINILM,
        sentences.STACKOVERFLOW_HEAD,
        sentences.AG_NEWS_HEAD,
        sentences.STACKOVERFLOW_LAYERS,
        generation.E2E_GPT2_LORA,
        generation.DART_GPT2_LORA,
    )
)
