// Sets the theme before anything is drawn: the user's choice, or else the system's.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem('holdfast.theme');
  } catch {}
  if (chosen === 'dark' || chosen === 'light') document.documentElement.dataset.theme = chosen;
})();
