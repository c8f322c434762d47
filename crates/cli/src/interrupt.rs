//! Ctrl-C: finish what is in hand if that is soon, then stop.

use crate::error::CommandError;
use crate::run::tell;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long the work in hand may take to end of itself. No command leaves anything half done that would need more: results
/// are flushed where they are whole, and files are written at the end.
const GRACE: Duration = Duration::from_secs(1);

/// Whether the user asked to stop. Clones share the answer.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens for Ctrl-C (and SIGTERM): the first asks to stop, and stops a second later whatever is in hand; another stops
    /// at once. A call that is complete within that second ends as one without Ctrl-C.
    pub fn listen() -> Self {
        let interrupt = Interrupt::default();
        let asked = interrupt.clone();
        let installed = ctrlc::set_handler(move || {
            if asked.0.swap(true, Ordering::Relaxed) {
                // Without a word: standard error may be what hangs.
                exit();
            }
            // A long call of a sampler looks at no flag. Without a thread there is the second Ctrl-C.
            let late = || {
                std::thread::sleep(GRACE);
                let _ = std::thread::Builder::new().spawn(|| {
                    std::thread::sleep(GRACE);
                    exit();
                });
                if std::io::stderr().is_terminal() {
                    // The text or the progress bar of the work in hand stands in the line.
                    let _ = writeln!(std::io::stderr());
                }
                tell(&CommandError::Interrupted.to_string());
                exit();
            };
            let _ = std::thread::Builder::new().spawn(late);
        });
        if let Err(error) = installed {
            tracing::warn!("Ctrl-C will stop at once, not cleanly: {error}");
        }
        interrupt
    }

    /// Whether it is time to stop.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// To be called between steps of long work.
    ///
    /// # Errors
    /// [`CommandError::Interrupted`] when it is time to stop.
    pub fn check(&self) -> Result<(), CommandError> {
        if self.asked() { Err(CommandError::Interrupted) } else { Ok(()) }
    }
}

/// Ends the process, whatever the other threads do.
fn exit() -> ! {
    std::process::exit(CommandError::Interrupted.exit_code().into())
}
