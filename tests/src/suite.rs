//! The macro that turns laws into tests, and the rules for skipped tests.

use crate::factory::SamplerFactory;
use crate::laws;
use crate::shared_reference::ReferenceResults;
use crate::trial::{Effort, Trial};
use std::collections::BTreeSet;
use std::io::Write;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// The environment variable of required words, separated by commas. A skip of a factory with one of these words in its
/// name is a failure.
pub const REQUIRE: &str = "FLASH_SAMPLING_REQUIRE";

/// The environment variable of the [`Effort`] of tests: `sample` (the default), `quick` or `full`.
pub const EFFORT: &str = "FLASH_SAMPLING_EFFORT";

/// Reads the effort of the statistical laws in tests from [`EFFORT`].
///
/// # Panics
/// Panics if [`EFFORT`] has another value.
pub fn effort() -> Effort {
    match std::env::var(EFFORT).as_deref() {
        Err(_) | Ok("sample") => Effort::Sample,
        Ok("quick") => Effort::Quick,
        Ok("full") => Effort::Full,
        Ok(other) => panic!("{EFFORT} is sample, quick or full, not {other}"),
    }
}

/// The names with a printed skip.
static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Returns the first word of `require` that is a word of `name`.
fn required<'r>(name: &str, require: &'r str) -> Option<&'r str> {
    require.split(',').map(str::trim).find(|word| !word.is_empty() && name.split('/').any(|part| part == *word))
}

/// Returns whether tests on `name` (words separated by `/`) run on this machine; prints a skip once per name.
///
/// A skip has the reason `unavailable` and the number of `tests`. It is printed in spite of the test harness's capture.
///
/// # Panics
/// Panics if the test is unavailable and [`REQUIRE`] has one of the words of `name`.
pub fn runs(name: &str, unavailable: Option<String>, tests: usize) -> bool {
    let Some(reason) = unavailable else { return true };
    let require = std::env::var(REQUIRE).unwrap_or_default();
    if let Some(word) = required(name, &require) {
        panic!("{name} cannot run here, but {REQUIRE} names {word}: {reason}");
    }
    let mut printed = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    if printed.insert(name.to_owned()) {
        // The test harness captures the print macros, but not this write. A closed stderr is not an error.
        let _ = writeln!(std::io::stderr(), "skipped: {tests} tests of {name}: {reason}");
    }
    false
}

/// Returns the lock that a test holds while it captures launches into a graph. Without it, [`drop_outside_captures`] in another
/// test could end the capture.
pub fn capture_lock() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops a value that launches on a GPU may still use, under the lock of [`capture_lock`]. The drop waits for the whole GPU,
/// and would end a capture.
pub fn drop_outside_captures<T>(value: T) {
    let _alone = capture_lock();
    drop(value);
}

/// Makes the trial of a factory in tests: the effort of [`EFFORT`], with results of the reference that all trials share.
pub fn trial(factory: &dyn SamplerFactory) -> Trial<'_> {
    static REFERENCE: LazyLock<ReferenceResults> = LazyLock::new(ReferenceResults::default);
    Trial { effort: effort(), reference_results: Some(&REFERENCE), ..Trial::new(factory) }
}

/// Runs one law as a test.
///
/// # Panics
/// Panics with the report if the law is broken, and if there is no law of this name.
pub fn check(factory: &dyn SamplerFactory, law: &str) {
    let law = laws::ALL.iter().find(|l| l.name == law).expect("the macro names laws of the table");
    if runs(&factory.name(), factory.unavailable(), laws::ALL.len()) {
        match law.check(&trial(factory)) {
            Ok(report) => println!("{report}"),
            Err(failure) => panic!("{failure}"),
        }
    }
}

/// Makes one test per law for a sampler factory: `suite!(module_name, factory_expression);`, or
/// `suite!(module_name, factory_expression, [law, law]);` for some laws only.
#[macro_export]
macro_rules! suite {
    ($name:ident, $factory:expr, [$($law:ident),* $(,)?]) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;
            $(
                #[test]
                fn $law() {
                    $crate::suite::check(&$factory, stringify!($law));
                }
            )*
        }
    };
    ($name:ident, $factory:expr) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;
            $crate::each_law!(law_tests { $factory });
        }
    };
}

/// Expands [`each_law!`](crate::each_law) to tests.
#[doc(hidden)]
#[macro_export]
macro_rules! law_tests {
    ({ $factory:expr } $(($module:ident, $law:ident, $promise:expr))*) => {
        $(
            #[test]
            fn $law() {
                $crate::suite::check(&$factory, stringify!($law));
            }
        )*
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_match_whole_words() {
        assert_eq!(required("cpu/tiled/avx512", "cuda, avx512"), Some("avx512"));
        assert_eq!(required("cpu/tiled/avx512bf16", "cuda,avx512"), None);
        assert_eq!(required("cpu/tiled", ""), None);
    }
}
