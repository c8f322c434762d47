//! Names of target architectures: `sm_80`, `sm_90a` and the like.

use core::fmt;
use core::str::FromStr;

/// A target architecture: a compute capability, and whether the code uses instructions of this capability only.
///
/// Code for `sm_80` runs on 8.0, 8.6 and 8.9 (the same major number, and no smaller minor number). Code for `sm_90a`
/// runs on 9.0 only, and may use its specific instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Architecture {
    major: u32,
    minor: u32,
    specific: bool,
}

const fn plain(major: u32, minor: u32) -> Architecture {
    Architecture { major, minor, specific: false }
}

const fn specific(major: u32, minor: u32) -> Architecture {
    Architecture { major, minor, specific: true }
}

impl Architecture {
    /// The architectures that kernels can be built for, given a compiler that supports them.
    pub const ALL: [Architecture; 16] = [
        plain(8, 0),
        plain(8, 6),
        plain(8, 7),
        plain(8, 9),
        plain(9, 0),
        specific(9, 0),
        plain(10, 0),
        specific(10, 0),
        plain(10, 3),
        specific(10, 3),
        plain(11, 0),
        specific(11, 0),
        plain(12, 0),
        specific(12, 0),
        plain(12, 1),
        specific(12, 1),
    ];

    /// One architecture per generation, for which CI compiles: Ampere (and Ada), Hopper, Blackwell (server, desktop).
    pub const USUAL: [Architecture; 4] = [plain(8, 0), specific(9, 0), specific(10, 0), specific(12, 0)];

    /// `sm_90a`, the only architecture with the instructions of the Hopper kernel.
    pub const HOPPER: Architecture = specific(9, 0);

    /// Returns the architecture to compile for on a GPU of this compute capability.
    pub(crate) fn of_capability((major, minor): (i32, i32)) -> Architecture {
        Architecture { major: major.max(0) as u32, minor: minor.max(0) as u32, specific: major >= 9 }
    }

    /// Returns other architectures whose code runs on this one, best first.
    pub(crate) fn also(self) -> impl Iterator<Item = Architecture> {
        (0..=self.minor).rev().map(move |minor| plain(self.major, minor)).filter(move |other| *other != self)
    }

    /// Returns the compute capability, major and minor.
    pub fn capability(self) -> (u32, u32) {
        (self.major, self.minor)
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}{}", self.major, self.minor, if self.specific { "a" } else { "" })
    }
}

/// The text does not name an architecture that kernels can be built for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{name}' is no architecture that kernels can be built for; known are {}", known())]
pub struct UnknownArchitecture {
    /// The text.
    pub name: String,
}

fn known() -> String {
    Architecture::ALL.map(|known| known.to_string()).join(", ")
}

impl FromStr for Architecture {
    type Err = UnknownArchitecture;

    fn from_str(name: &str) -> Result<Self, UnknownArchitecture> {
        let found = Architecture::ALL.into_iter().find(|known| known.to_string() == name);
        found.ok_or_else(|| UnknownArchitecture { name: name.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_others_are_refused_with_the_list() {
        for known in Architecture::ALL {
            assert_eq!(known.to_string().parse(), Ok(known));
        }
        for name in ["sm_75", "sm_90b", "90a", "sm_80a", "compute_90", "", "sm_090"] {
            let message = name.parse::<Architecture>().unwrap_err().to_string();
            assert!(message.contains(&format!("'{name}'")) && message.contains("sm_80, sm_86"), "{message}");
        }
    }

    #[test]
    fn code_for_a_smaller_minor_number_runs_and_code_for_one_capability_does_not() {
        let also =
            |capability| Architecture::of_capability(capability).also().map(|a| a.to_string()).collect::<Vec<_>>();
        assert_eq!(Architecture::of_capability((9, 0)), Architecture::HOPPER);
        assert_eq!(also((9, 0)), ["sm_90"]);
        assert_eq!(also((8, 6)), ["sm_85", "sm_84", "sm_83", "sm_82", "sm_81", "sm_80"]);
        assert!(!also((12, 1)).contains(&"sm_120a".into()) && also((12, 1)).contains(&"sm_120".into()));
    }
}
