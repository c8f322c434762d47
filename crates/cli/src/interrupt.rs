//! Ctrl-C: ends a short step of work normally, and a long one after a second.

use crate::error::{CommandError, print_error};
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Time for the current step after Ctrl-C. Ending a longer step does no harm: finished results are flushed, and files
/// are written at the end.
const GRACE: Duration = Duration::from_secs(1);

/// Whether the user pressed Ctrl-C. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens for Ctrl-C and SIGTERM. The first signal ends the process within a second, a second one at once. A call
    /// that completes within that second ends normally.
    pub fn listen() -> Self {
        let interrupt = Interrupt::default();
        let signalled = interrupt.clone();
        let installed = ctrlc::set_handler(move || {
            if signalled.0.swap(true, Ordering::Relaxed) {
                // Standard error may be blocked.
                exit();
            }
            // A long call of a sampler does not check the state. If no thread starts, a second signal ends the process.
            let exit_late = || {
                std::thread::sleep(GRACE);
                if std::io::stderr().is_terminal() {
                    // The line may have text or a progress bar.
                    let _ = writeln!(std::io::stderr());
                }
                print_error(&CommandError::Interrupted.to_string());
                exit();
            };
            let _ = std::thread::Builder::new().spawn(exit_late);
        });
        if let Err(error) = installed {
            tracing::warn!("Ctrl-C will end the process without cleanup: {error}");
        }
        interrupt
    }

    /// Whether a signal has arrived.
    pub fn is_interrupted(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Ends long work between two steps.
    ///
    /// # Errors
    /// [`CommandError::Interrupted`] after a signal.
    pub fn check(&self) -> Result<(), CommandError> {
        if self.is_interrupted() { Err(CommandError::Interrupted) } else { Ok(()) }
    }
}

/// Ends the process, in any state of its other threads.
fn exit() -> ! {
    std::process::exit(CommandError::Interrupted.exit_code().into())
}
