"""The import path of `ProviderData` that provider files name (`provider_data_validator`), those of users among them."""

from .requests.options import ProviderData as ProviderData
