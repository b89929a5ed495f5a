"""The import path of `ProviderData` in provider files (`provider_data_validator`), those of users included."""

from .requests.options import ProviderData as ProviderData
