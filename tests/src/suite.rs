//! The macro that turns laws into tests, and what happens to tests that cannot run here.

use crate::factory::SamplerFactory;
use crate::laws;
use crate::trial::{Effort, Trial};
use std::collections::BTreeSet;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The environment switch: words, separated by commas; a factory with one of them in its name must not be skipped.
pub const REQUIRE: &str = "FLASH_SAMPLING_REQUIRE";

/// The environment switch for more draws in tests: `quick` or `full`, as [`Effort`] says; without it, a sample.
pub const EFFORT: &str = "FLASH_SAMPLING_EFFORT";

/// How much work the statistical laws do in tests.
///
/// # Panics
/// When [`EFFORT`] names none.
pub fn effort() -> Effort {
    match std::env::var(EFFORT).as_deref() {
        Err(_) | Ok("sample") => Effort::Sample,
        Ok("quick") => Effort::Quick,
        Ok("full") => Effort::Full,
        Ok(other) => panic!("{EFFORT} is sample, quick or full, not {other}"),
    }
}

/// The names whose skip was printed.
static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The word of `require` that forbids skipping `name`, if there is one.
fn required<'r>(name: &str, require: &'r str) -> Option<&'r str> {
    require.split(',').map(str::trim).find(|word| !word.is_empty() && name.split('/').any(|part| part == *word))
}

/// Whether a test on `name` (words separated by `/`) runs. When `unavailable` says why it cannot, the skip is printed
/// past the test harness's capture: once per name, with the number of `tests` on it.
///
/// # Panics
/// When the environment requires one of the words of `name`.
pub fn runs(name: &str, unavailable: Option<String>, tests: usize) -> bool {
    let Some(reason) = unavailable else { return true };
    let require = std::env::var(REQUIRE).unwrap_or_default();
    if let Some(word) = required(name, &require) {
        panic!("{name} cannot run here, but {REQUIRE} names {word}: {reason}");
    }
    let mut printed = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    if printed.insert(name.to_owned()) {
        // The test harness captures what the print macros write, not this. A closed stderr is no reason to fail.
        let _ = writeln!(std::io::stderr(), "skipped: {tests} tests of {name}: {reason}");
    }
    false
}

/// Held while launches are captured into a graph, which another test must not end: see [`drop_alone`].
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops what launches on a GPU may still use, in which nothing is captured: it waits for the whole GPU, and would end a
/// capture.
pub fn drop_alone<T>(value: T) {
    let _alone = alone();
    drop(value);
}

/// Runs one law as a test.
///
/// # Panics
/// When the law is broken, with its report; when there is no law of that name.
pub fn check(factory: &dyn SamplerFactory, law: &str) {
    let law = laws::ALL.iter().find(|l| l.name == law).expect("the macro names laws of the table");
    if runs(&factory.name(), factory.unavailable(), laws::ALL.len()) {
        match law.check(&Trial { effort: effort(), ..Trial::new(factory) }) {
            Ok(report) => println!("{report}"),
            Err(failure) => panic!("{failure}"),
        }
    }
}

/// One test per law for a sampler factory: `suite!(module_name, factory_expression);`.
#[macro_export]
macro_rules! suite {
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
