//! The configuration of a sampler, as data and as text.

use core::fmt;
use core::str::FromStr;
use flash_sampling_core::Plan;
#[cfg(feature = "cpu")]
use flash_sampling_cpu::CpuOptions;
#[cfg(feature = "distributed")]
use flash_sampling_distributed::ShardMerge;

/// The backend of a sampler.
///
/// As text: `reference`, `cpu`, `cpu:avx2` (an instruction set), `cpu:avx2:4` or `cpu::4` (threads), `cuda`, `cuda:1` (a
/// device). [`Display`](fmt::Display) writes the text that [`FromStr`] reads.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Backend {
    /// The f64 reference: exact and slow; it holds a row of logits.
    Reference,
    /// The CPU.
    #[cfg(feature = "cpu")]
    Cpu(CpuOptions),
    /// A CUDA device. Without the feature `cuda`, [`build`](crate::build()) returns an error.
    Cuda {
        /// The device's number among the devices of `CUDA_VISIBLE_DEVICES`, from 0.
        device: usize,
    },
}

impl Default for Backend {
    /// The CPU with default options, or the reference without the feature `cpu`.
    fn default() -> Self {
        #[cfg(feature = "cpu")]
        return Backend::Cpu(CpuOptions::default());
        #[cfg(not(feature = "cpu"))]
        return Backend::Reference;
    }
}

/// The variant of a sampler. Sizes are in tokens.
///
/// As text: `tiled`, `grouped:512`, `online:512`, `sharded:4`, `sharded:4:log-mass`.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum VariantConfig {
    /// One winner per row and tile (paper Alg. 1). Pathwise.
    #[default]
    Tiled,
    /// Log-mass and local sample of each group, then a draw of the group (paper Alg. I.2). In distribution.
    Grouped {
        /// Tokens per group; a multiple of 64, except for the reference.
        size: u32,
    },
    /// Groups streamed through the binary merge (paper Alg. I.3). In distribution.
    Online {
        /// Tokens per group; a multiple of 64, except for the reference.
        size: u32,
    },
    /// Near-equal shards in this process (paper Alg. I.4). Pathwise or in distribution, depending on `merge`.
    #[cfg(feature = "distributed")]
    Sharded {
        /// Number of shards, 1 to [`MAX_SHARDS`](crate::MAX_SHARDS).
        shards: usize,
        /// The merge of the shards' draws.
        merge: ShardMerge,
    },
}

/// A backend, a variant and a plan. The default is the tiled variant on the CPU, planned for one row and one draw.
///
/// With the feature `serde`, as JSON: `{"backend": "cpu", "variant": "online:512", "plan": {"max_rows": 8}}`. Missing
/// fields have their defaults.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct BackendConfig {
    /// The backend.
    pub backend: Backend,
    /// The variant.
    pub variant: VariantConfig,
    /// The plan.
    pub plan: Plan,
    /// Whether the sampler makes a [`Shadow`](crate::Shadow) of the weight, if the head has none.
    ///
    /// The draws are the same. Calls of few rows without filters and log-probabilities take about half the time. So do
    /// calls with filters, if the first filter of each row is a min-p or a top-k: at most 1024 on the CPU, at most 128 on
    /// a GPU. The shadow takes a byte for each weight: half the memory of a bf16 weight.
    ///
    /// Pathwise variants use a shadow: tiled, and shards that merge winners. So do these variants of the reference. For
    /// others [`build`](crate::build()) returns [`BuildError::Shadow`](crate::BuildError::Shadow), and for a quantised
    /// weight [`HeadError::ShadowType`](crate::HeadError::ShadowType).
    pub shadow: bool,
}

/// A text that is not a backend or variant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is no {what}: it must be {expected}")]
pub struct ParseConfigError {
    text: String,
    what: &'static str,
    expected: &'static str,
}

/// The parts of a text between colons; `None` if there are more than `N`. Missing parts are empty.
fn parts<const N: usize>(text: &str) -> Option<[&str; N]> {
    let mut parts = text.split(':');
    let found = core::array::from_fn(|_| parts.next().unwrap_or(""));
    parts.next().is_none().then_some(found)
}

/// Parses a part of a text; an empty part is the default.
fn part_or<T: FromStr>(part: &str, default: T) -> Option<T> {
    if part.is_empty() { Some(default) } else { part.parse().ok() }
}

impl Backend {
    fn parse(text: &str) -> Option<Backend> {
        match parts::<3>(text)? {
            ["reference", "", ""] => Some(Backend::Reference),
            ["cuda", device, ""] => part_or(device, 0).map(|device| Backend::Cuda { device }),
            #[cfg(feature = "cpu")]
            ["cpu", isa, threads] => {
                let isa = if isa.is_empty() { None } else { Some(isa.parse().ok()?) };
                let threads = if threads.is_empty() { None } else { Some(threads.parse().ok()?) };
                Some(Backend::Cpu(CpuOptions { isa, threads }))
            }
            _ => None,
        }
    }
}

impl FromStr for Backend {
    type Err = ParseConfigError;

    fn from_str(text: &str) -> Result<Backend, ParseConfigError> {
        let expected = "reference, cpu[:INSTRUCTION SET[:THREADS]] or cuda[:DEVICE]";
        Backend::parse(text).ok_or_else(|| ParseConfigError { text: text.into(), what: "backend", expected })
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Backend::Reference => f.write_str("reference"),
            Backend::Cuda { device } => write!(f, "cuda:{device}"),
            #[cfg(feature = "cpu")]
            Backend::Cpu(CpuOptions { isa, threads }) => {
                f.write_str("cpu")?;
                if isa.is_some() || threads.is_some() {
                    write!(f, ":{}", isa.map_or("", |isa| isa.name()))?;
                }
                threads.map_or(Ok(()), |threads| write!(f, ":{threads}"))
            }
        }
    }
}

impl VariantConfig {
    fn parse(text: &str) -> Option<VariantConfig> {
        match parts::<3>(text)? {
            ["tiled", "", ""] => Some(VariantConfig::Tiled),
            ["grouped", size, ""] => Some(VariantConfig::Grouped { size: size.parse().ok()? }),
            ["online", size, ""] => Some(VariantConfig::Online { size: size.parse().ok()? }),
            #[cfg(feature = "distributed")]
            ["sharded", shards, merge] => {
                let merge = match merge {
                    "" | "winners" => ShardMerge::Winners,
                    "log-mass" => ShardMerge::LogMass,
                    _ => return None,
                };
                Some(VariantConfig::Sharded { shards: shards.parse().ok()?, merge })
            }
            _ => None,
        }
    }
}

impl FromStr for VariantConfig {
    type Err = ParseConfigError;

    fn from_str(text: &str) -> Result<VariantConfig, ParseConfigError> {
        let expected = "tiled, grouped:SIZE, online:SIZE or sharded:SHARDS[:log-mass]";
        VariantConfig::parse(text).ok_or_else(|| ParseConfigError { text: text.into(), what: "variant", expected })
    }
}

impl fmt::Display for VariantConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VariantConfig::Tiled => f.write_str("tiled"),
            VariantConfig::Grouped { size } => write!(f, "grouped:{size}"),
            VariantConfig::Online { size } => write!(f, "online:{size}"),
            #[cfg(feature = "distributed")]
            VariantConfig::Sharded { shards, merge: ShardMerge::Winners } => write!(f, "sharded:{shards}"),
            #[cfg(feature = "distributed")]
            VariantConfig::Sharded { shards, merge: ShardMerge::LogMass } => write!(f, "sharded:{shards}:log-mass"),
        }
    }
}

/// Implements serde by the text form.
#[cfg(feature = "serde")]
macro_rules! serialize_as_text {
    ($($name:ty),*) => {$(
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
                text.parse().map_err(serde::de::Error::custom)
            }
        }
    )*};
}
#[cfg(feature = "serde")]
serialize_as_text!(Backend, VariantConfig);
